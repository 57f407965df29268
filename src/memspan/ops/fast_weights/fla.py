"""The delta rule, and its relatives, by flash-linear-attention's kernels for CUDA (Yang and Zhang 2024,
package ``fla``).

Products are in bfloat16, the memory in float32. Only by name, and nothing is converted for it: callers
pass bfloat16. **It has not been run on a GPU yet**; tests put functions with fla's signatures in its
place. See fla at https://github.com/fla-org/flash-linear-attention, ``fla/ops``.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from memspan.ops.fast_weights.rules import RuleInputs

KERNELS = {
    # S' = D S + beta k (x) (v - k D S), by the shape of D: one, a number per head, one per feature.
    "chunk_delta_rule": "fla.ops.delta_rule",
    "chunk_gated_delta_rule": "fla.ops.gated_delta_rule",
    "chunk_kda": "fla.ops.kda",
    # S' = D S + k (x) v
    "chunk_simple_gla": "fla.ops.simple_gla",
    "chunk_gla": "fla.ops.gla",
    # S' = D S + b (a S) + k (x) v
    "chunk_dplr_delta_rule": "fla.ops.generalized_delta_rule",
}
"""Kernels and their modules."""
WIDEST_KEY = 256
"""Features that fla's kernels take."""
DEVICE = "cuda"
CAPABILITY = (8, 0)
"""The least that products of bfloat16 need on a GPU of NVIDIA."""


def obstacle(inputs: RuleInputs) -> str | None:
    """Why the kernels cannot run on these inputs; None if they can."""
    if inputs.beta is None:
        return "has no sum rule: use chunked"
    return unfit([inputs.q, inputs.k, inputs.v], inputs.weights)


def unfit(rounded: list[Tensor], weights: Tensor) -> str | None:
    """Why no kernel can run on tensors such as these.

    Args:
        rounded: those that must be in bfloat16.
        weights: the memory, ``[B, H, K, V]``.
    """
    if any(t.device.type != DEVICE for t in (*rounded, weights)):
        return "needs CUDA: use compiled or chunked"
    if not _installed():
        return "needs flash-linear-attention: install it, or use chunked"
    if _capability(weights) < CAPABILITY:
        return "needs a GPU of compute capability 8.0 or more: use chunked"
    if any(t.dtype != torch.bfloat16 for t in rounded) or weights.dtype != torch.float32:
        return (
            "takes queries, keys and values in bfloat16 with a memory in float32: choose precision "
            "bfloat16, or use chunked"
        )
    if weights.shape[2] > WIDEST_KEY:
        return f"takes at most {WIDEST_KEY} features of a key: use chunked"
    return None


def run(inputs: RuleInputs) -> tuple[Tensor, Tensor]:
    """Heads of keys are repeated for those of values: not all releases of fla share them."""
    inputs = inputs.by_value_head()
    assert inputs.beta is not None
    given = {
        "q": inputs.features(inputs.q),
        "k": inputs.features(inputs.k),
        "v": inputs.v,
        "beta": inputs.beta,
    }
    kernel = "chunk_delta_rule"
    if inputs.log_decay is not None:
        given["g"] = inputs.log_decay
        kernel = "chunk_gated_delta_rule" if inputs.log_decay.dim() == 3 else "chunk_kda"
    return launch(kernel, given, inputs.weights, inputs.starts)


def launch(
    kernel: str, given: dict[str, Tensor], weights: Tensor, starts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Heads come third in fla, ``[B, T, H, K]``, and queries are scaled unless told otherwise.

    Args:
        kernel: a name from :data:`KERNELS`.
        given: its arguments ``[B, H, T, ...]``, by their names in fla.
        weights: the memory before the first token, ``[B, H, K, V]``.
        starts: bool ``[B, T]``: where documents start (None: nowhere).

    Returns:
        ``[B, H, T, V]`` and the memory after the last token.
    """
    rule = getattr(import_module(KERNELS[kernel]), kernel)
    given = {name: tensor.transpose(1, 2) for name, tensor in given.items()}
    if starts is None:
        y, after = rule(**given, scale=1.0, initial_state=weights, output_final_state=True)
        return y.transpose(1, 2), after
    sequences = _Sequences(starts)
    y, after = rule(
        **{name: tensor.flatten(0, 1)[None] for name, tensor in given.items()},
        scale=1.0,
        initial_state=sequences.memories_before(weights),
        output_final_state=True,
        cu_seqlens=sequences.bounds,
    )
    return y.view(given["v"].shape).transpose(1, 2), after[sequences.last]


class _Sequences:
    """Rows cut at ``starts [B, T]`` into N sequences that follow one another, as fla takes documents:
    one row of all tokens, and a memory for each sequence."""

    def __init__(self, starts: Tensor) -> None:
        begins = starts.clone()
        begins[:, 0] = True
        self.bounds = F.pad(begins.flatten().nonzero().flatten(), (0, 1), value=begins.numel())
        """Where each begins, and the end: ``[N + 1]``."""
        counts = begins.sum(1)
        self.last = counts.cumsum(0) - 1
        """The last sequence of each row, ``[B]``."""
        self._first = self.last - counts + 1
        self._anew = starts[:, 0]

    def memories_before(self, weights: Tensor) -> Tensor:
        """``weights [B, ...]`` before the first sequence of a row, unless a document starts there too,
        and zeros before the others: ``[N, ...]``."""
        memories = weights.new_zeros(len(self.bounds) - 1, *weights.shape[1:])
        kept = weights.masked_fill(self._anew[:, None, None, None], 0)
        return memories.index_copy(0, self._first, kept)


def _capability(like: Tensor) -> tuple[int, int]:
    """Capability of the GPU of ``like``; of other makers', enough."""
    if not like.is_cuda or torch.version.hip is not None:
        return CAPABILITY
    return torch.cuda.get_device_capability(like.device)


@cache
def _installed() -> bool:
    return find_spec("fla") is not None
