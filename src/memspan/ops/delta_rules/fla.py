"""The generalized delta rule by flash-linear-attention's kernels for CUDA.

Without a lookup those of gated linear attention, of which Mamba-2 and RetNet are cases; with one that
of RWKV-7, whose transition is diagonal plus low rank. See :mod:`memspan.ops.fast_weights.fla`.
"""

from __future__ import annotations

from torch import Tensor

from memspan.ops.delta_rules.rule import Inputs
from memspan.ops.fast_weights import fla


def obstacle(inputs: Inputs) -> str | None:
    """Why the kernels cannot run on these inputs; None if they can."""
    rounded = [inputs.q, inputs.k, inputs.v, inputs.erase, inputs.lookup]
    return fla.unfit([t for t in rounded if t is not None], inputs.weights)


def run(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """By the kernel for these decays."""
    q, k, v, weights, log_decay, erase, lookup, starts, _ = inputs
    given = {"q": q, "k": k, "v": v}
    if lookup is not None and erase is not None:
        # b (a S) is added.
        given |= {"a": lookup, "b": -erase, "gk": per_channel(log_decay, k, weights)}
        return fla.launch("chunk_dplr_delta_rule", given, weights, starts)
    if log_decay is not None:
        given["g"] = log_decay
    kernel = "chunk_gla" if log_decay is not None and log_decay.dim() == 4 else "chunk_simple_gla"
    return fla.launch(kernel, given, weights, starts)


def per_channel(log_decay: Tensor | None, k: Tensor, weights: Tensor) -> Tensor:
    """``[B, H, T, K]`` from one per head, or zeros, in the type of the memory."""
    if log_decay is None:
        return weights.new_zeros(k.shape)
    return log_decay if log_decay.dim() == 4 else log_decay.unsqueeze(-1).expand(k.shape)
