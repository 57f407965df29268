"""Write what each architecture computes, for authors of other runtimes to compare with.

    python tests/vectors.py FOLDER               # make vectors writes into ./vectors
    python tests/vectors.py FOLDER kda gla       # of these architectures alone

``NAME.safetensors`` and ``NAME.json``, as ``docs/vectors.md`` describes: parameters, three segments of
which one has a document's start, the outputs and the memory after each, the loss, its gradients.
Everything is computed in float64 by the readable path, ``implementation="reference"``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import memspan
from memspan.models import LanguageModel
from memspan.models.registry import MODELS

VOCABULARY = 13
ROWS = 2
SEGMENTS = (7, 1, 5)
"""Tokens of each."""
START = (1, 2)
"""Row and token of the last segment that begins a document."""
SIZES: dict[str, Any] = {
    "n_layers": 2,
    "d_model": 8,
    "n_heads": 2,
    "d_ff": 16,
    "memory_length": 6,
    "compressed_length": 4,
    "block_length": 5,
    "memory_tokens": 2,
    "chunk_size": 4,
    "convolution": 3,
}
"""Small, so that every length within is crossed; of these an architecture has what it knows."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in MODELS} | {
    "fast-weights-sum": ("fast-weights", {"rule": "sum"}),
    "retnet": ("gla", {"decay": "retention"}),
    "infini-delta": ("infini", {"update": "delta"}),
    "armt": ("rmt", {"associative": True}),
}
"""The architecture and options of a file's name."""


def model_of(name: str) -> LanguageModel:
    """The model of a case. Parameters that begin as zero or one would hide mistakes: all are moved."""
    architecture, options = CASES[name]
    config = MODELS[architecture]
    known = {field.name for field in dataclasses.fields(config)}
    sizes = {key: value for key, value in SIZES.items() if key in known}
    torch.manual_seed(0)
    model = LanguageModel(VOCABULARY, config(**sizes | options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    # Numbers that float32 has, so that every runtime begins with the same.
    return model.double()


def inputs() -> dict[str, Tensor]:
    """Tokens and targets of all segments, and the starts of the last."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(VOCABULARY, (ROWS, sum(SEGMENTS) + 1), generator=generator)
    starts = torch.zeros(ROWS, SEGMENTS[-1], dtype=torch.bool)
    starts[START] = True
    return {"tokens": text[:, :-1], "targets": text[:, 1:], "starts": starts}


def computed(model: LanguageModel, implementation: str | None) -> dict[str, Tensor]:
    """All segments, the memory carried along with its graph; the loss is the mean of all tokens'."""
    given = inputs()
    tokens = given["tokens"].split(SEGMENTS, 1)
    targets = given["targets"].split(SEGMENTS, 1)
    found: dict[str, Tensor] = {}
    losses = []
    auxiliary = []
    memory = None
    for n, segment in enumerate(tokens):
        starts = given["starts"] if n == len(SEGMENTS) - 1 else None
        options = {"starts": starts, "implementation": implementation}
        found[f"seg{n}.logits"] = model(segment, memory, **options).logits
        output = model(segment, memory, targets=targets[n], **options)
        losses.append(output.losses)
        auxiliary.append(output.auxiliary_loss)
        memory = output.memory
        found |= {f"seg{n}.memory.{name}": t for name, t in memory.tensors().items()}
    found["loss"] = torch.cat(losses, 1).mean()
    found["auxiliary_loss"] = torch.stack(auxiliary).sum()
    parameters = dict(model.named_parameters())
    total = found["loss"] + found["auxiliary_loss"]
    gradients = torch.autograd.grad(total, [*parameters.values()], allow_unused=True)
    found |= {
        f"grad.{name}": g for name, g in zip(parameters, gradients, strict=True) if g is not None
    }
    return {name: t.detach() for name, t in found.items()}


def write(name: str, folder: Path) -> None:
    """The two files of a case."""
    model = model_of(name)
    tensors = {f"in.{key}": t for key, t in inputs().items()}
    tensors |= {f"param.{key}": t.float() for key, t in model.named_parameters()}
    tensors |= {f"f64.{key}": t for key, t in computed(model, "reference").items()}
    save_file(
        {key: t.contiguous().clone() for key, t in tensors.items()}, folder / f"{name}.safetensors"
    )
    architecture, _ = CASES[name]
    description = {
        "architecture": architecture,
        "options": dataclasses.asdict(model.backbone.config),
        "vocabulary": VOCABULARY,
        "segments": SEGMENTS,
        "memspan": memspan.__version__,
        "torch": torch.__version__,
    }
    (folder / f"{name}.json").write_text(json.dumps(description, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)} (all)")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in CASES]
    if unknown:
        parser.error(f"there is no {unknown[0]}: use {', '.join(CASES)}")
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.names or CASES:
        write(name, options.folder)
        print(options.folder / f"{name}.safetensors")


if __name__ == "__main__":
    main()
