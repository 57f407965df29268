"""A recurrence over tokens as one over chunks of tokens, in PyTorch.

Inside, tensors are ``[N, M, G, ...]``: ``N`` chunks of ``G`` tokens, ``M = B * H`` heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CACHE_BYTES = 1 << 20
"""On a CPU, as many chunks are processed at once as have memories of this size in total."""
RECOMPUTED_CHUNKS = 16
"""With ``recompute``, chunks between two memories that are saved for backward."""


def by_chunks(
    read: Callable[..., tuple[Tensor, Tensor]],
    weights: Tensor,
    tensors: Sequence[Tensor],
    size: int,
    recompute: bool,
) -> tuple[Tensor, Tensor]:
    """Divide ``[B, H, T, ...]`` into chunks, read them, and put the outputs together again.

    The tokens after the last full chunk form a shorter one: nothing is padded.

    Args:
        read: ``read(weights, *chunks)`` with ``[M, K, V]`` and ``[N, M, G, ...]`` returns outputs
            ``[N, M, G, V]`` and the memory after them.
        weights: the memory before the first token, ``[B, H, K, V]``.
        tensors: what the tokens bring.
        size: tokens per chunk.
        recompute: compute everything inside again in the backward pass.
    """
    batch, n_heads, length = tensors[0].shape[:3]
    size = min(size, length)
    full = length - length % size
    block = size * _chunks_at_once(weights, recompute)
    lengths = [min(block, full - start) for start in range(0, full, block)]
    lengths += [length - full] if full < length else []
    now = weights.flatten(0, 1)
    outputs = []
    # Split once: the backward of slices would write a gradient of the full length for each.
    for blocks in zip(*(t.split(lengths, 2) for t in tensors), strict=True):
        chunks = [_to_chunks(t, min(size, t.shape[2])) for t in blocks]
        if recompute:
            y, now = checkpoint(  # type: ignore[misc]
                read, now, *chunks, use_reentrant=False, preserve_rng_state=False
            )
        else:
            y, now = read(now, *chunks)
        outputs.append(_from_chunks(y, batch, n_heads))
    y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
    return y.transpose(1, 2), now.view(weights.shape)


def _chunks_at_once(weights: Tensor, recompute: bool) -> int:
    """On a CPU, as many as its cache holds; elsewhere all."""
    if recompute:
        return RECOMPUTED_CHUNKS
    memory = weights.numel() * weights.element_size()
    # Exports may leave the number of rows free.
    if weights.device.type != "cpu" or not isinstance(memory, int):
        return 1 << 30
    return max(1, CACHE_BYTES // max(1, memory))


def _to_chunks(x: Tensor, size: int) -> Tensor:
    """``[B, H, N * G, K] -> [N, B * H, G, K]``."""
    return x.unflatten(2, (-1, size)).permute(2, 0, 1, 3, 4).flatten(1, 2).contiguous()


def _from_chunks(y: Tensor, batch: int, n_heads: int) -> Tensor:
    """``[N, B * H, G, V] -> [B, N * G, H, V]``, the order in memory that the next product needs."""
    n_chunks, _, size, width = y.shape
    y = y.view(n_chunks, batch, n_heads, size, width)
    return y.permute(1, 0, 3, 2, 4).flatten(1, 2)
