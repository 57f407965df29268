"""The recall experiment's models, what theory says about them, and what they are asked."""

from __future__ import annotations

import dataclasses
import math
import sys
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memspan.models import (
    BackboneConfig,
    CompressiveConfig,
    DeltaProductConfig,
    EmbeddingConfig,
    FastWeightsConfig,
    FeedbackConfig,
    GatedDeltaNet2Config,
    GatedDeltaNetConfig,
    GLAConfig,
    InfiniConfig,
    KDAConfig,
    LanguageModel,
    LSTMConfig,
    Mamba2Config,
    RMTConfig,
    RWKV7Config,
    TransformerConfig,
    TransformerXLConfig,
)
from recall_peers import Peer, mamba2, sliding_llama
from recall_task import Recall

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import plots

N_LAYERS = 2
WIDTH = 64
SEGMENT = 64
MEMORY = 128
COMPRESSED = 128
RATE = 4
"""T, M (Feedback's span S, too), C and c."""
BLOCK = 16
"""Tokens of a block where memory is written block by block: gradients pass through the memory of the
blocks of one segment."""
UNLIMITED = math.inf


@dataclass(frozen=True)
class Contestant:
    """A model to be made with any inner width, and what theory says about it."""

    config: Callable[[int], Any]
    """A backbone's config, or that of a model of transformers."""
    style: dict[str, Any]
    """Style of its line: its architecture's colour, dashes and markers."""
    label: str
    reach: float
    """Direct reach in tokens, at a segment's first token."""
    grows: bool
    """True if the reach is longer later in a segment."""
    main: bool = True
    """True if it is in the picture of architectures."""
    decays: bool = True
    """False: matrices of Gated DeltaNet never decay."""


def _sizes(width: int) -> dict[str, Any]:
    return {"n_layers": N_LAYERS, "d_model": WIDTH, "n_heads": 4, "d_ff": width}


COMPRESSIONS = ("convolution", "dilated-convolution", "mean", "max", "most-used")


def _compressive(function: str) -> Contestant:
    def config(width: int) -> BackboneConfig:
        return CompressiveConfig(
            **_sizes(width),
            memory_length=MEMORY,
            compressed_length=COMPRESSED,
            compression_rate=RATE,
            compression=function,  # type: ignore[arg-type]
            positions="learned",
        ).for_segments(SEGMENT)

    return Contestant(
        config,
        plots.look("compressive", COMPRESSIONS.index(function)),
        f"Compressive, {function.replace('-convolution', '')}",
        MEMORY + RATE * COMPRESSED,
        grows=True,
        main=function == "convolution",
    )


def _fast_weights(rule: str, nu: int) -> Contestant:
    def config(width: int) -> BackboneConfig:
        # A sum grows without end, so what is read is divided by the sum of all keys, as in the paper.
        return FastWeightsConfig(
            **_sizes(width),
            rule=rule,  # type: ignore[arg-type]
            nu=nu,
            normalisation="sum" if rule == "delta" else "attention",
        )

    label = f"Fast Weights, {rule}" + (f", {nu * WIDTH // 2} features" if nu != 2 else "")
    variant = 3 if nu != 2 else 0 if rule == "delta" else 2
    style = plots.look("fast-weights", variant)
    return Contestant(config, style, label, UNLIMITED, False, main=not variant)


def _gated(width: int) -> GatedDeltaNetConfig:
    """With matrices of as many numbers as those of Fast Weights, 64 x 16 there."""
    return GatedDeltaNetConfig(**_sizes(width), d_head=WIDTH // 2)


CONTESTANTS = {
    "transformer-xl": Contestant(
        lambda width: TransformerXLConfig(
            **_sizes(width), memory_length=MEMORY, positions="learned"
        ).for_segments(SEGMENT),
        plots.look("transformer-xl"), "Transformer-XL", MEMORY, True,
    ),
    **{
        f"compressive-{function}": _compressive(function)
        for function in ("mean", "convolution", "dilated-convolution", "max", "most-used")
    },
    "feedback": Contestant(
        lambda width: FeedbackConfig(**_sizes(width), memory_length=MEMORY),
        plots.look("feedback"), "Feedback", MEMORY, False,
    ),
    "fast-weights-delta": _fast_weights("delta", 2),
    "fast-weights-sum": _fast_weights("sum", 2),
    "fast-weights-delta-32": _fast_weights("delta", 1),
    "gated-delta-net": Contestant(
        _gated, plots.look("gated-delta-net"), "Gated DeltaNet", UNLIMITED, False
    ),
    "gated-delta-net-no-decay": Contestant(
        _gated, plots.look("gated-delta-net", 2), "the same, no decay", UNLIMITED, False,
        main=False, decays=False,
    ),
    "gated-delta-net-negative": Contestant(
        lambda width: dataclasses.replace(_gated(width), negative_eigenvalues=True),
        plots.look("gated-delta-net", 3), "Gated DeltaNet, β to 2", UNLIMITED, False, main=False,
    ),
    "mamba-2": Contestant(
        lambda width: mamba2(N_LAYERS, 2 * round(width / 2)),
        plots.look("mamba-2"), "Mamba-2", UNLIMITED, False,
    ),
    "sliding-llama": Contestant(
        lambda width: sliding_llama(N_LAYERS, WIDTH, width, MEMORY),
        plots.look("sliding-window"), "sliding Llama", MEMORY, False,
    ),
    **{
        name: Contestant(
            config, plots.look(name.removeprefix("memspan-")), label, UNLIMITED, False
        )
        for name, label, config in (
            ("kda", "KDA", lambda width: KDAConfig(**_sizes(width), d_head=WIDTH // 2)),
            ("memspan-mamba-2", "Mamba-2", lambda width: Mamba2Config(**_sizes(width))),
            (
                "gla", "GLA",
                lambda width: GLAConfig(**_sizes(width), d_head=WIDTH // 2, d_value=WIDTH // 2),
            ),
            (
                "retention", "RetNet",
                lambda width: GLAConfig(
                    **_sizes(width), d_head=WIDTH // 2, d_value=WIDTH // 2, decay="retention"
                ),
            ),
            (
                "delta-product", "DeltaProduct",
                lambda width: DeltaProductConfig(**_sizes(width), d_head=WIDTH // 2),
            ),
            (
                "gated-delta-net-2", "Gated DeltaNet 2",
                # Its gates have most parameters: with more no inner width is left.
                lambda width: GatedDeltaNet2Config(**_sizes(width), d_head=30),
            ),
            ("rwkv-7", "RWKV-7", lambda width: RWKV7Config(**_sizes(width), d_head=WIDTH // 2)),
            (
                "rmt", "RMT",
                lambda width: RMTConfig(**_sizes(width), block_length=BLOCK, memory_tokens=BLOCK),
            ),
            (
                "armt", "ARMT",
                lambda width: RMTConfig(
                    **_sizes(width), block_length=BLOCK, memory_tokens=BLOCK, associative=True
                ),
            ),
            ("infini", "Infini", lambda width: InfiniConfig(**_sizes(width), block_length=BLOCK)),
        )
    },
    "transformer": Contestant(
        lambda width: TransformerConfig(**_sizes(width)),
        plots.look("transformer"), "no memory", 0, True,
    ),
    "lstm": Contestant(
        lambda width: LSTMConfig(n_layers=N_LAYERS, d_model=width),
        plots.look("lstm"), "LSTM", UNLIMITED, False,
    ),
}  # fmt: skip
EDGES = (
    ("T", SEGMENT, "transformer"),
    ("S", MEMORY, "feedback"),
    ("M+T", MEMORY + SEGMENT, "transformer-xl"),
    ("M+cC", MEMORY + RATE * COMPRESSED, "compressive-convolution"),
)
"""Theory's edges of distances, and of which model; drawn in."""
FEATURES = (
    ("32 features", 32, "fast-weights-delta-32"),
    ("64 features", 64, "fast-weights-delta"),
)
"""The same about the number of keys, for one head of Fast Weights."""


@dataclass(frozen=True)
class Panel:
    """Models that are trained and scored."""

    task: Recall
    models: tuple[str, ...]
    live: tuple[int, ...]
    """Numbers of live keys, in turn among the rows."""
    distances: tuple[int, int] = (1, 4096)
    """Scored: from, up to."""
    seconds: float = 100
    """CPU time of a run."""
    rates: tuple[float, ...] = (2e-3, 4e-3, 8e-3)
    """Learning rates that are tried."""
    trial: float = 50
    """CPU time of a trial."""
    trials: str = "rates"
    """Name of the trials' rows; panels that share it share their trials."""

    @property
    def over_distance(self) -> bool:
        """True if accuracy is shown against distance, not against the number of keys."""
        return len(self.live) == 1


TODAY = (
    "kda", "memspan-mamba-2", "gla", "retention", "delta-product", "gated-delta-net-2", "rwkv-7",
    "rmt", "armt", "infini",
)  # fmt: skip
_ALL = tuple(
    name
    for name in CONTESTANTS
    if name not in ("fast-weights-delta-32", "gated-delta-net-negative", *TODAY)
)
_OVER_DISTANCE = Panel(Recall(), _ALL, (16,))
PANELS = {
    "time": _OVER_DISTANCE,
    "level": _OVER_DISTANCE,
    # The memories of today, and three of those above on the same machine.
    "today": Panel(
        Recall(), (*TODAY, "gated-delta-net", "fast-weights-delta", "transformer-xl"), (16,),
        seconds=50, rates=(4e-3, 8e-3), trial=25, trials="rates-today",
    ),
    # Distances that every memory covers directly.
    "keys": Panel(
        Recall(n_keys=128, n_values=4, longest=512),
        ("transformer-xl", "compressive-mean", "feedback", "fast-weights-delta",
         "fast-weights-delta-32", "fast-weights-sum", "gated-delta-net",
         "gated-delta-net-no-decay", "mamba-2", "lstm"),
        (4, 8, 16, 32, 64, 128),
        (64, 128),
    ),
}  # fmt: skip


def model_of(name: str, width: int, vocab_size: int) -> LanguageModel | Peer:
    """The contestant with that inner width."""
    contestant = CONTESTANTS[name]
    config = contestant.config(width)
    if not isinstance(config, BackboneConfig):
        return Peer(config, vocab_size)
    # What is read is never an answer: with tied tables, all that is read would be pushed away from
    # answers alike, and become alike.
    model = LanguageModel(vocab_size, config, EmbeddingConfig(tie=False))
    if not contestant.decays:
        for each, parameter in model.named_parameters():
            if each.endswith("A_log"):
                nn.init.constant_(parameter, -torch.inf).requires_grad_(False)
    return model


def n_parameters(name: str, width: int, vocab_size: int) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in model_of(name, width, vocab_size).parameters())


def made(name: str, vocab_size: int) -> LanguageModel | Peer:
    """The contestant with as many parameters as Transformer-XL with the usual inner width."""
    wanted = n_parameters("transformer-xl", 4 * WIDTH, vocab_size)
    widths = range(8, 8 * WIDTH)
    at = bisect_left(widths, wanted, key=lambda width: n_parameters(name, width, vocab_size))
    near = widths[max(at - 1, 0) : at + 1]
    width = min(near, key=lambda width: abs(n_parameters(name, width, vocab_size) - wanted))
    return model_of(name, width, vocab_size)


def in_reach(name: str, distances: Tensor, places: Tensor) -> Tensor:
    """Mark questions whose write is in direct reach, from their places in their segments."""
    model = CONTESTANTS[name]
    return distances <= model.reach + (places if model.grows else 0)
