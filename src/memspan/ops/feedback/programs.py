"""The Feedback Transformer's recurrence by the Triton programs of ``triton_kernel.py``: where they can
run, and what they are given.

All tokens and layers of a row are one launch in either direction. **Nobody has run it on a GPU yet**:
see ``docs/gpu.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memspan.ops import triton_programs
from memspan.ops.feedback import steps
from memspan.ops.feedback.buffers import Buffers, Options

WIDEST_STATE = 2048
"""The widest residual stream, which a program holds in registers."""
new_slots = steps.new_slots


def obstacle(x: Tensor) -> str | None:
    """Why the programs cannot run on tensors such as ``x [B, T, D]``; None if they can."""
    if triton_programs.MISSING is not None:
        return triton_programs.MISSING
    from memspan.ops.feedback import triton_kernel

    if reason := triton_programs.obstacle(x, triton_kernel.forward):
        return reason
    if x.shape[-1] > WIDEST_STATE:
        return f"takes states up to {WIDEST_STATE} wide, not {x.shape[-1]}: use fused"
    return None


class Tiles(NamedTuple):
    """Rows and columns of a matrix that a program takes at once, slots of memory, and its warps."""

    inputs: int = 64
    outputs: int = 64
    keys: int = 32
    warps: int = 8


TILES = Tiles()
"""These spill on no target tried."""
ROWS = 16
"""Rows of the batch that the programs of position gradients multiply at once."""


class Sizes(NamedTuple):
    """Sizes and options that are compiled into the programs."""

    d_model: int
    d_ff: int
    n_layers: int
    n_heads: int
    width: int
    groups: int
    post_norm: bool
    gelu: bool
    norms_memory: bool
    sees_part: bool
    drops_weights: bool
    drops: bool

    @classmethod
    def of(cls, b: Buffers, options: Options) -> Sizes:
        n_layers, n_heads, d_model, width = b["query"].shape
        return cls(
            d_model,
            b["inner"].shape[2],
            n_layers,
            n_heads,
            width,
            groups=b["memory"].shape[1] // (2 * n_heads * width),
            post_norm="sums" in b,
            gelu=options.activation == "gelu",
            norms_memory=options.norms_memory,
            sees_part="visible" in b,
            drops_weights="kept_weights" in b,
            drops="kept_attention" in b,
        )

    def constants(self, tiles: Tiles) -> dict[str, Any]:
        """Arguments that are compiled into the programs of a row, and the options of compilation."""
        return {
            "D_MODEL": self.d_model,
            "D_FF": self.d_ff,
            "N_LAYERS": self.n_layers,
            "N_HEADS": self.n_heads,
            "WIDTH": self.width,
            "GROUPS": self.groups,
            "POST": self.post_norm,
            "GELU": self.gelu,
            "NORMS_MEMORY": self.norms_memory,
            "SEES_PART": self.sees_part,
            "DROPS_WEIGHTS": self.drops_weights,
            "DROPS": self.drops,
            "STATE": padded(self.d_model),
            "COLUMNS": padded(self.width),
            "KEYS": tiles.keys,
            "INPUTS": tiles.inputs,
            "OUTPUTS": tiles.outputs,
            "num_warps": tiles.warps,
            # A pipeline would load what other threads have not stored yet.
            "num_stages": 1,
        }

    def position_constants(self, tiles: Tiles) -> dict[str, Any]:
        """The same for the programs of position gradients."""
        kept = ("N_LAYERS", "N_HEADS", "WIDTH", "COLUMNS", "KEYS", "num_stages")
        constants = self.constants(tiles)
        return {name: constants[name] for name in kept} | {"ROWS": ROWS, "num_warps": 4}


def padded(width: int) -> int:
    """A power of two, 16 or more."""
    return max(16, 1 << (width - 1).bit_length())


def prepare(buffers: Buffers, options: Options) -> Callable[[Buffers], None]:
    """As :func:`memspan.ops.feedback.steps.prepare`. Backward computes ``probabilities`` again: they
    are dropped, and ``totals [T, L, H * B]`` take their place."""
    from memspan.ops.feedback import triton_kernel

    n_layers, n_heads = buffers["query"].shape[:2]
    _, n_steps, batch, _ = buffers["streams"].shape
    del buffers["probabilities"]
    buffers["totals"] = empty(buffers["streams"], n_steps, n_layers, n_heads * batch)

    def forward(given: Buffers) -> None:
        b = buffers | given
        sizes = Sizes.of(b, options)
        # [L, H, D, K] -> [L, D, H, K]
        b["query"] = b["query"].transpose(1, 2)
        _launch(triton_kernel.forward, FORWARD, b, options, sizes)

    return forward


def backward(buffers: Buffers, options: Options, gradients: Buffers) -> None:
    """As :func:`memspan.ops.feedback.steps.backward`."""
    from memspan.ops.feedback import triton_kernel

    b = buffers | gradients
    sizes = Sizes.of(b, options)
    _, n_steps, batch, _ = b["streams"].shape
    n_old = b["kv"].shape[3] - n_steps
    n_seen = sum(min(options.span, n_old + t) for t in range(n_steps))
    b["d_scores"] = empty(b["totals"], sizes.n_layers * sizes.n_heads * batch * n_seen)
    for name in ("output", "outer"):
        # Without the bias.
        b[name] = b[name][:, :-1]
    for name in ("output", "outer", "inner", "memory"):
        b[name] = b[name].mT
    # [L, H, D, K] -> [L, H, K, D]
    b["query"] = b["query"].mT
    _launch(triton_kernel.backward, BACKWARD, b, options, sizes)
    parts = -(-options.span // TILES.keys)
    with torch.cuda.device_of(b["streams"]):
        triton_kernel.position_gradients[(sizes.n_layers * sizes.n_heads * parts,)](
            *(b[name] for name in POSITIONS),
            n_steps,
            batch,
            n_old,
            options.span,
            **sizes.position_constants(TILES),
        )


FORWARD = (
    "streams", "sums", "queries", "attended", "activated", "before", "vectors", "kv", "totals",
    "query", "query_bias", "position_keys", "position_scores", "output", "inner", "inner_bias",
    "outer", "memory", "memory_bias", "mix", "gains", "biases", "visible",
    "kept_weights", "kept_attention", "kept_activated", "kept_feed_forward",
)  # fmt: skip
BACKWARD = (
    "streams", "sums", "queries", "activated", "before", "vectors", "kv", "totals",
    "d_streams", "d_added", "d_inner", "d_query", "d_vectors", "d_projected", "d_kv", "d_scores",
    "query", "position_keys", "position_scores", "output", "inner", "outer", "memory", "mix", "gains",
    "visible", "kept_weights", "kept_attention", "kept_activated", "kept_feed_forward",
)  # fmt: skip
POSITIONS = ("queries", "d_scores", "d_position_keys", "d_position_scores")
"""Tensors of the programs, in the order of their arguments."""


def _launch(
    program: Any, names: tuple[str, ...], b: Buffers, options: Options, sizes: Sizes
) -> None:
    """Launch one of the programs of a row. Tensors that are not there are not touched."""
    _, n_steps, batch, _ = b["streams"].shape
    kept = b.get("kept_weights")
    with torch.cuda.device_of(b["streams"]):
        program[(batch,)](
            *(laid_out(b.get(name, b["streams"])) for name in names),
            n_steps,
            batch,
            b["kv"].shape[3] - n_steps,
            options.span,
            0 if kept is None else kept.shape[3],
            options.eps,
            options.weights_scale,
            options.scale,
            **sizes.constants(TILES),
        )


def laid_out(t: Tensor) -> Tensor:
    """``t`` as the programs take it: contiguous, masks as bytes. What they write to is so already."""
    return (t.view(torch.uint8) if t.dtype == torch.bool else t).contiguous()


def empty(like: Tensor, *shape: int) -> Tensor:
    """Storage in float32 for what a program writes; tests put guarded storage in its place."""
    return like.new_empty(shape, dtype=torch.float32)
