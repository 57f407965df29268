"""Peers' checkpoints made of recorded tensors, and our models of them, as our converters read them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import transfo_xl_folder
from golden import Golden
from memspan.converters import authors, labml, transfo_xl
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
OPTIONS = {"eps": "epsilon", "nu": "nu", "heads": "n_heads", "n_layers": "n_layers"}
"""Options of recordings, by our names."""


def labml_tensors(g: Golden) -> dict[str, Tensor]:
    """The tensors of their ``AutoregressiveModel``; some sets recorded its transformer only."""
    tensors = dict(g.named("param."))
    if "src_embed.weight" in tensors:
        return tensors
    rows = torch.linspace(-1, 1, 7 * g.config["d_model"]).view(7, -1)
    made = {f"transformer.{name}": tensor for name, tensor in tensors.items()}
    made |= {"src_embed.weight": rows, "generator.weight": rows.flip(0)}
    return made | {"generator.bias": torch.zeros(7)}


def labml_run(folder: Path, g: Golden) -> Path:
    """A run's folder, with a tensor in each file."""
    at = folder / "checkpoints" / "300"
    at.mkdir(parents=True)
    files = {}
    for name, tensor in labml_tensors(g).items():
        files[name] = f"model_{name}.npy"
        np.save(at / files[name], tensor.cpu().numpy())
    (at / "info.json").write_text(json.dumps({"model": files, "accuracy": {}}))
    values = {"seq_len": 12, "dropout": 0.1, "optimizer.learning_rate": 2.5e-4, "device": "cpu"}
    values |= {n: v for n, v in g.config.items() if isinstance(v, int)}
    entries = [CONFIG.format(name=name, value=value) for name, value in sorted(values.items())]
    (folder / "configs.yaml").write_text("".join(entries))
    return folder


def model_of(g: Golden, folder: Path) -> tuple[LanguageModel, Names]:
    """Our model of a configuration, and its parameters by the recorded names.

    ``folder``: a new one for the checkpoint.
    """
    tensors = {name: tensor.cpu() for name, tensor in g.named("param.")}
    if g.set == "kimi_xl":
        folder.mkdir()
        torch.save({"model_state": tensors, "model_config": g.config}, folder / "model.pt")
        found = authors.read(folder)
    elif g.set == "hf_transfo_xl":
        found = transfo_xl.read(transfo_xl_folder.write(folder, g.config, tensors))
    else:
        found = labml.read(labml_run(folder, g))
    config = found.config
    # What the peer's files do not say, and the converter takes from its code.
    own = {ours: g.config[name] for name, ours in OPTIONS.items() if name in g.config}
    own = {name: value for name, value in own.items() if hasattr(config.model, name)}
    backbone = dataclasses.replace(config.model, **own)
    model = LanguageModel(found.tokenizer.vocab_size, backbone, config.embedding)
    sources = [
        next((n for n in g.tied_to(f"crit.out_projs.{i}") if "word_emb.emb_projs." in n), "")
        for i in range(len(model.head.projections))
    ]
    if any(sources) and not all(sources[1:]):
        # Patterns that no option names are tied by hand.
        for i, name in enumerate(sources):
            if name:
                model.head.projections[i] = model.embedding.projections[int(name.split(".")[-1])]
    rows, like = found.names(model), next(model.parameters())
    fill(model, rows, {n: t.to(like.device) for n, t in found.tensors.items()}, "the recording")
    # Some of labml's recordings are of the transformer alone.
    prefix = "transformer." if "param.norm.weight" in g else ""
    return model.to(g.dtype).eval(), {n.removeprefix(prefix): row for n, row in rows.items()}
