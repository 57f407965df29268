"""Runs of labml_nn, made of recorded tensors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from golden import Golden
from memspan.converters import labml
from memspan.converters.names import Names, fill
from memspan.models import LanguageModel

CONFIG = """\
{name}:
  computed: {value}
  is_explicitly_specified: true
  is_hyperparam: null
  name: {name}
  options:
  - {name}_option
  order: 3
  type: <class 'int'>
  value: 0
"""
"""An entry of ``configs.yaml``, as PyYAML writes it."""


def tensors_of(g: Golden) -> dict[str, Tensor]:
    """The tensors of their ``AutoregressiveModel``; some sets recorded its transformer only."""
    tensors = dict(g.named("param."))
    if "src_embed.weight" in tensors:
        return tensors
    rows = torch.linspace(-1, 1, 7 * g.config["d_model"]).view(7, -1)
    made = {f"transformer.{name}": tensor for name, tensor in tensors.items()}
    made |= {"src_embed.weight": rows, "generator.weight": rows.flip(0)}
    return made | {"generator.bias": torch.zeros(7)}


def write(folder: Path, g: Golden, step: int = 300) -> Path:
    """A run's folder, with a tensor in each file."""
    at = folder / "checkpoints" / str(step)
    at.mkdir(parents=True)
    files = {}
    for name, tensor in tensors_of(g).items():
        files[name] = f"model_{name}.npy"
        np.save(at / files[name], tensor.cpu().numpy())
    (at / "info.json").write_text(json.dumps({"model": files, "accuracy": {}}))
    values = {"seq_len": 12, "dropout": 0.1, "optimizer.learning_rate": 2.5e-4, "device": "cpu"}
    values |= {n: v for n, v in g.config.items() if isinstance(v, int)}
    entries = [CONFIG.format(name=name, value=value) for name, value in sorted(values.items())]
    (folder / "configs.yaml").write_text("".join(entries))
    return folder


def model_of(g: Golden, folder: Path) -> tuple[LanguageModel, Names]:
    """Our model of the run that is written to ``folder``, and its parameters by recorded names."""
    found = labml.read(write(folder / str(g.dtype), g))
    config = found.config
    model = LanguageModel(found.tokenizer.vocab_size, config.model, config.embedding)
    rows, like = found.names(model), next(model.parameters())
    fill(model, rows, {n: t.to(like.device) for n, t in found.tensors.items()}, "the run")
    prefix = "" if "param.src_embed.weight" in g else "transformer."
    return model.to(g.dtype).eval(), {n.removeprefix(prefix): row for n, row in rows.items()}
