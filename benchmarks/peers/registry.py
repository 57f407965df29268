"""The comparisons: every architecture's sizes, our side and its peers."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

from peers.side import Side, Size

S = Size(128, 4, 6, 512, segment_length=64, memory_length=64, batch_size=16)
M = Size(256, 8, 6, 1024, segment_length=128, memory_length=128, batch_size=16)
L = Size(256, 8, 2, 1024, segment_length=256, memory_length=512, batch_size=4)
PAPER = Size(512, 8, 12, 2048, segment_length=512, memory_length=512, batch_size=1)
COMPRESSIVE = {
    name: replace(size, compressed_length=size.memory_length)
    for name, size in {"S": S, "M": M}.items()
}


def feedback_size(length: int) -> Size:
    return Size(128, 4, 4, 512, segment_length=length, memory_length=2 * length, batch_size=16)


def fast_weights_size(length: int) -> Size:
    works = ("train", "attention") + (("generate",) if length == 64 else ())
    size = replace(feedback_size(length), n_layers=1, memory_length=0, generate_batch=16)
    return replace(size, works=works, alone=length > 1024)


# Architecture: its sizes.
SIZES: dict[str, dict[str, Size]] = {
    "transformer-xl": {
        "S": S,
        "M": M,
        "L": L,
        "L-batch8": replace(L, generate_batch=8, works=("generate",)),
        **{
            f"{name}-batch16": replace(size, generate_batch=16, works=("generate",))
            for name, size in (("S", S), ("M", M), ("L", L))
        },
        "paper": PAPER,
    },
    "compressive": COMPRESSIVE
    | {
        f"{name}-no-loss": replace(size, auxiliary_loss=False, works=("train",))
        for name, size in COMPRESSIVE.items()
    },
    # Each segment starts empty, as with the peer; generation goes on from one to twice its length.
    "feedback": {
        **{f"T{n}": feedback_size(n) for n in (64, 128, 256)},
        "T64-dropout": replace(feedback_size(64), dropout=0.1, works=("train",)),
    },
    "fast-weights": {
        **{f"T{n}": fast_weights_size(n) for n in (64, 256, 1024, 4096, 16384)},
        "T64-batch1": replace(fast_weights_size(64), generate_batch=1, works=("generate",)),
    },
    # In training each segment starts empty, as with the peer.
    "gated-delta-net": {
        "S": replace(S, memory_length=0),
        "M": replace(M, memory_length=0),
        "H128": Size(512, 4, 2, 2048, segment_length=512, memory_length=0, batch_size=2),
    },
}
# Architecture: our side, then its peers, each "module:class" of this package. Imported when used.
ARCHITECTURES = {
    "transformer-xl": {
        "memspan": "memspan:MemspanXL",
        "labml": "labml:LabmlXL",
        "labml-short-table": "labml:LabmlShortTable",
        "x-transformers": "x_transformers_xl:XTransformersXL",
        "plain-gpt": "gpt:PlainGPT",
    },
    "compressive": {"memspan": "memspan:MemspanCompressive", "labml": "labml:LabmlCompressive"},
    "feedback": {"memspan": "memspan:MemspanFeedback", "labml": "labml:LabmlFeedback"},
    "fast-weights": {
        "memspan": "memspan:MemspanFW",
        "labml": "labml:LabmlFW",
        "labml-repaired": "labml:LabmlRepairedFW",
    },
    "gated-delta-net": {
        "memspan": "memspan:MemspanGated",
        "transformers": "transformers_gated:TransformersGated",
    },
}


def side_class(architecture: str, name: str) -> type[Side]:
    module, kind = ARCHITECTURES[architecture][name].split(":")
    found: type[Side] = getattr(import_module(f"peers.{module}"), kind)
    return found
