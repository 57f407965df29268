"""The trained model that a figure computes with: its words and weights, as a script holds them."""

from __future__ import annotations

import base64
import json
import struct
import tomllib
from pathlib import Path
from typing import Any

from docsite.code import ROOT
from docsite.errors import DocsError

RUNS = Path("src/memspan/lab/trained")
"""Where the runs that come with memspan are."""
LAYER = "backbone.layers.0."
NAMES = {
    "embedding.tables.0": "embedding",
    "head.tables.0": "head",
    "head.biases.0": "head_bias",
    "backbone.final_norm.weight": "final_norm",
    "backbone.final_norm.bias": "final_norm_bias",
    f"{LAYER}mixer_norm.weight": "mixer_norm",
    f"{LAYER}mixer_norm.bias": "mixer_norm_bias",
    f"{LAYER}feed_forward_norm.weight": "feed_forward_norm",
    f"{LAYER}feed_forward_norm.bias": "feed_forward_norm_bias",
    f"{LAYER}feed_forward.inner.weight": "inner",
    f"{LAYER}feed_forward.inner.bias": "inner_bias",
    f"{LAYER}feed_forward.outer.weight": "outer",
    f"{LAYER}feed_forward.outer.bias": "outer_bias",
    **{
        f"{LAYER}mixer.{name}{'.weight' * linear}": name
        for linear, names in (
            (True, "query key value beta step output_gate norm output"),
            (False, "convolution A_log dt_bias"),
        )
        for name in names.split()
    },
}
"""The names of tensors in a file, and in ``style/asked.js``."""


def model_of(run: str, root: Path = ROOT) -> dict[str, Any]:
    """A run's vocabulary, sizes and weights in float16, as ``style/asked.js`` takes them.

    Args:
        run: a Gated DeltaNet of one layer that comes with memspan.
        root: the repository.

    Raises:
        DocsError: there is no such run, or it is another model.
    """
    folder = root / RUNS / run
    if not folder.is_dir():
        raise DocsError(f"{RUNS} has no run {run}")
    config = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    sizes = config["model"]
    simple = {"n_layers": 1, "activation": "relu", "negative_eigenvalues": False}
    tensors = _tensors(folder / "model.safetensors")
    if {name: sizes[name] for name in simple} != simple or tensors.keys() != NAMES.keys():
        raise DocsError(f"{run} is not the model that style/asked.js computes")
    halves = b"".join(values for _, values in tensors.values())
    words = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    return {
        "vocabulary": words["tokenizer"]["words"],
        "heads": sizes["n_heads"],
        "width": sizes["d_head"],
        "tensors": [[NAMES[name], *shape] for name, (shape, _) in tensors.items()],
        "halves": base64.b64encode(halves).decode(),
    }


def _tensors(path: Path) -> dict[str, tuple[list[int], bytes]]:
    """The shape and the bytes of each tensor in a file of safetensors; all must be float16."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    found = {}
    for name, about in header.items():
        if about["dtype"] != "F16":
            raise DocsError(f"{path.parent.name}: {name} is not float16")
        start, end = about["data_offsets"]
        found[name] = (about["shape"], content[8 + length :][start:end])
    return found
