"""Multi-head self-attention over a memory and a segment with relative positions.

The projections around :func:`memspan.ops.relative_attention.relative_attention`, which the
architectures with a memory of hidden states share.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from memspan.errors import MemspanError
from memspan.ops.relative_attention import relative_attention


class RelativeSelfAttention(nn.Module):
    """Queries from the segment, keys and values from memory and segment (Dai et al. 2019, section 3.3).

    Args:
        d_model: width of the input, D.
        n_heads: heads, H.
        head_width: width of one head, K.
        table_rows: rows of the learned position tables (None: the paper's projected sinusoids).
        bias: biases on the value and output projections.
        dropout: probability with which an attention weight is dropped in training.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        head_width: int,
        *,
        table_rows: int | None,
        bias: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        self.n_heads, self.head_width, self.dropout = n_heads, head_width, dropout
        inner = n_heads * head_width
        self.query = nn.Linear(d_model, inner, bias=False)
        self.key = nn.Linear(d_model, inner, bias=False)
        self.value = nn.Linear(d_model, inner, bias=bias)
        self.output = nn.Linear(inner, d_model, bias=bias)
        if table_rows is None:
            self.position = nn.Linear(d_model, inner, bias=False)
        else:
            self.position_keys = nn.Parameter(torch.empty(table_rows, n_heads, head_width))
            self.position_scores = nn.Parameter(torch.empty(table_rows, n_heads))

    def heads(self, x: Tensor) -> Tensor:
        """``[B, T, H*K] -> [B, H, T, K]``."""
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

    def distances(self, codes: Tensor) -> tuple[Tensor, Tensor | None]:
        """Keys ``[H, S, K]`` and scores ``[H, S]`` of the distances ``0 .. S-1``.

        ``codes``: their sinusoids ``[S, D]``, or their rows ``int64 [S]`` in the learned tables.
        """
        if codes.is_floating_point():
            keys = self.position(codes).unflatten(-1, (self.n_heads, self.head_width))
            return keys.transpose(0, 1), None
        return self.position_keys[codes].transpose(0, 1), self.position_scores[codes].t()

    def project(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of ``x [B, T, D]``, keys and values of ``memory [B, M, D]`` and ``x``, per head.

        The two are projected apart: no gradient is computed for a memory that is detached.
        """
        keys = torch.cat([self.key(memory), self.key(x)], 1)
        values = torch.cat([self.value(memory), self.value(x)], 1)
        return self.heads(self.query(x)), self.heads(keys), self.heads(values)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        codes: Tensor,
        mask: Tensor,
        content_bias: Tensor,
        position_bias: Tensor | None,
        received: Tensor | None = None,
    ) -> Tensor:
        """From what :meth:`project` gave to the sub-layer's output ``[B, T, D]``.

        ``received [B, S]``: the attention that each key receives is added to it.
        """
        position_keys, position_scores = self.distances(codes)
        attended = relative_attention(
            q,
            k,
            v,
            position_keys,
            content_bias=content_bias,
            position_bias=position_bias,
            position_scores=position_scores,
            mask=mask,
            dropout=self.dropout if self.training else 0.0,
            received=received,
        )
        return self.output(attended.transpose(1, 2).flatten(2))


def table_rows(positions: str, max_distance: int | None) -> int | None:
    """Rows of the learned tables that a config asks for; None for sinusoids."""
    if positions == "sinusoidal":
        return None
    if max_distance is None:
        raise MemspanError(
            "learned positions need a table size: set max_distance to the longest span in "
            "use, memory and segment together"
        )
    return max_distance
