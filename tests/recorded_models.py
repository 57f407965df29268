"""Our models of recorded tensors, through our converters where these read such checkpoints."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

import labml_models
import transfo_xl_folder
from golden import Golden
from memspan.lab.converters import authors, transfo_xl
from memspan.lab.converters.names import Names, fill
from memspan.models import LanguageModel

OPTIONS = {"eps": "epsilon", "nu": "nu", "heads": "n_heads", "n_layers": "n_layers"}
"""Options of recordings, by our names."""


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
        found = labml_models.read(g)
    config = found.config
    # Options that the peer's files lack, which the converter takes from its code.
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
    rows = found.names(model)
    like = next(model.parameters())
    fill(model, rows, {n: t.to(like.device) for n, t in found.tensors.items()}, "the recording")
    # Some of labml's recordings are of the transformer alone.
    prefix = "transformer." if "param.norm.weight" in g else ""
    return model.to(g.dtype).eval(), {n.removeprefix(prefix): row for n, row in rows.items()}
