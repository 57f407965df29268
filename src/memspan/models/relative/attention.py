"""Relative attention (Dai et al. 2019, arXiv 1901.02860, section 3.3) over a memory and a segment.

A query ``i`` and a key ``j`` of memory or segment, ``i - j`` tokens apart, have the score ::

    A_ij = ( (q_i + u) . k_j + (q_i + v) . R_(i-j) ) / sqrt(K)

where ``R`` is a projected sinusoid of the distance, and ``u`` and ``v`` are biases. Transformer-XL and
the Compressive Transformer attend in this way; each has a memory of its own. The operation itself is
:func:`memspan.ops.relative.relative_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memspan.errors import MemspanError
from memspan.models.known import known
from memspan.nn import FeedForward, dropout_layer, sinusoids
from memspan.ops.limits import Limits
from memspan.ops.relative import Positions, attention_weights, relative_attention

if TYPE_CHECKING:
    from memspan.models.relative.options import RelativeConfig
    from memspan.models.segments import Documents

GATE_BIAS = 2.0
"""``b`` of a gate at the start: ``z`` is then about 0.12, and a layer nearly the identity."""


@dataclass(frozen=True)
class Span:
    """The keys that a query attends to, and the distances that have a position code of their own.

    No parameter depends on it, so a trained model may be read with another one.
    """

    attention: str
    """``segment``: all of memory and the segment's past. ``fixed``: the last ``slots`` positions, the
    query's own included, ``slots`` being the memory's size."""
    clamp_length: int | None
    """Distances over this share its code (None: each has its own)."""

    def largest_code(self, n_distances: int, slots: int) -> int:
        """The largest of the distances ``0 .. n_distances - 1`` with a code of its own."""
        limit = n_distances - 1
        if self.attention == "fixed":
            limit = min(limit, slots - 1)
        return limit if self.clamp_length is None else min(limit, self.clamp_length)

    def check_slots(self, slots: int) -> None:
        """Refuse a memory without a slot for a fixed span: the token itself takes one."""
        if slots < (self.attention == "fixed"):
            raise MemspanError(f"memory_length must be at least 1 for a fixed span, not {slots}")

    def codes(self, config: RelativeConfig, n_distances: int, slots: int, like: Tensor) -> Tensor:
        """Codes of the distances ``0 .. n-1``: sinusoids ``[n, D]`` or table rows ``int64 [n]``.

        ``slots``: the memory's size. ``like``: a parameter, for type and device.
        """
        limit = self.largest_code(n_distances, slots)
        rows = config.max_distance
        if rows is not None and limit >= rows:
            raise MemspanError(
                f"a span of {limit + 1} slots, {slots} of them memory, exceeds the learned position "
                f"table of {rows} rows: read shorter segments, lower memory_length or set "
                f"clamp_length to {rows - 1}"
            )
        distance = torch.arange(n_distances, device=like.device).clamp(max=limit)
        if config.positions == "learned":
            return distance
        return sinusoids(distance, config.d_model, like.dtype)

    def visible(
        self,
        used: Tensor,
        n_queries: int,
        n_old: int,
        slots: int,
        documents: Documents | None = None,
    ) -> Limits:
        """Keys that each query sees: of the right-most ``used [B]`` of N old columns, and of the
        segment's past. ``[B, T]``.

        ``slots``: the memory's size, N where no column is left out. ``documents``: the segment's.
        """
        last = torch.arange(n_old, n_old + n_queries, device=used.device)
        last = last.expand(used.shape[0], -1)
        first = (n_old - used[:, None]).expand_as(last)
        if self.attention == "fixed":
            first = first.maximum(last - (slots - 1))
        if documents is not None:
            first = first.maximum(n_old + documents.first_columns(-n_old))
        return Limits(first, last)


def seen_by(implementation: str | None, limits: Limits, n_keys: int) -> Tensor | Limits:
    """``limits`` as they are for an implementation that reads them, for others as one mask for all
    layers."""
    return limits if implementation == "triton" else limits.mask(n_keys)


@dataclass(frozen=True)
class AttentionPass:
    """One pass, as the attention of all layers shares it."""

    codes: Tensor
    """Codes of the distances, see :meth:`Span.codes`."""
    mask: Tensor | Limits
    """Bool ``[B, T, S]``, or what :func:`seen_by` keeps of it."""
    implementation: str | None = None
    """See :func:`relative_attention`."""
    weights: list[Tensor] | None = None
    """A list that receives each layer's attention weights ``[B, H, T, S]`` (None: not wanted)."""
    documents: Documents | None = None
    """Documents of the segment (None: none starts or ends in it)."""


class RelativeAttention(nn.Module):
    """Queries, keys and values, position codes, and the biases ``u`` and ``v``; no memory of its own.

    ``content_bias`` is ``u``, ``[H, K]``; ``position_bias`` is ``v``, only with sinusoidal positions.
    Learned positions have a table ``position_keys [P, H, K]`` in place of ``R``, and scores of their
    own, ``position_scores [P, H]``.
    """

    def __init__(self, config: RelativeConfig) -> None:
        super().__init__()
        self.config = config
        self.n_heads = config.n_heads
        self.head_width = config.head_width
        self.dropout = config.attention_dropout
        d_model = config.d_model
        inner = self.n_heads * self.head_width
        bias = config.attention_bias
        self.query = nn.Linear(d_model, inner, bias=False)
        self.key = nn.Linear(d_model, inner, bias=False)
        self.value = nn.Linear(d_model, inner, bias=bias)
        self.output = nn.Linear(inner, d_model, bias=bias)
        heads = (self.n_heads, self.head_width)
        self.content_bias = nn.Parameter(torch.zeros(heads))
        self.position_bias: nn.Parameter | None = None
        rows = config.max_distance
        if config.positions == "sinusoidal":
            self.position_bias = nn.Parameter(torch.zeros(heads))
            self.position = nn.Linear(d_model, inner, bias=False)
        elif rows is None:
            raise MemspanError(
                "learned positions need a table size: set max_distance to the longest span in "
                "use, memory and segment together"
            )
        else:
            self.position_keys = nn.Parameter(torch.zeros(rows, *heads))
            self.position_scores = nn.Parameter(torch.zeros(rows, self.n_heads))

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

    def pass_alone(
        self, n_tokens: int, slots: int, used: Tensor, implementation: str | None
    ) -> AttentionPass:
        """The pass of a layer that is not in a stack: over ``slots`` of memory, of which a row uses the
        right-most ``used [B]``, and ``n_tokens`` of a segment."""
        config = self.config
        span = Span(config.attention_span, config.clamp_length)
        codes = span.codes(config, slots + n_tokens, slots, self.content_bias)
        if codes.is_floating_point():
            codes = F.dropout(codes, config.dropout, self.training)
        limits = span.visible(used, n_tokens, slots, slots)
        mask = seen_by(implementation, limits, slots + n_tokens)
        return AttentionPass(codes, mask, implementation)

    def project(
        self, x: Tensor, memory: Tensor, norm: nn.Module | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of ``x [B, T, D]``, keys and values of ``memory [B, M, D]`` and ``x``, per head, all
        after ``norm`` (None: as they are).

        The two are projected apart: no gradient is computed for a memory that is detached.
        """
        if norm is not None:
            x = norm(x)
            memory = norm(memory)
        keys = torch.cat([self.key(memory), self.key(x)], 1)
        values = torch.cat([self.value(memory), self.value(x)], 1)
        return self.heads(self.query(x)), self.heads(keys), self.heads(values)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        shared: AttentionPass,
        received: Tensor | None = None,
    ) -> Tensor:
        """The sub-layer's output ``[B, T, D]`` from the results of :meth:`project`.

        Args:
            q: queries ``[B, H, T, K]``.
            k: keys ``[B, H, S, K]`` of memory and segment; ``v``: their values.
            shared: position codes and mask of this pass.
            received: ``[B, S]``; the attention that each key receives is added to it.
        """
        keys, scores = self.distances(shared.codes)
        positions = Positions(keys, scores, self.content_bias, self.position_bias)
        if shared.weights is not None:
            # Without a graph, which would live as long as the caller's list.
            with torch.no_grad():
                shared.weights.append(attention_weights(q, k, positions, mask=shared.mask))
        attended = relative_attention(
            q,
            k,
            v,
            positions,
            mask=shared.mask,
            dropout=self.dropout if self.training else 0.0,
            implementation=shared.implementation,
            received=received,
        )
        return self.output(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


@known()
class GRUGate(nn.Module):
    """The gate in place of a residual sum (GTrXL: Parisotto et al. 2019, arXiv 1910.06764, section 3.2,
    "Gated-Recurrent-Unit-type gating"): a GRU whose state is the residual stream ``x`` and whose input
    is ``y = relu(branch)``, a sub-layer's output:

    ``r = sigmoid(W_r y + U_r x)``, ``z = sigmoid(W_z y + U_z x - b)``,
    ``h = tanh(W_g y + U_g (r * x))``, ``x' = (1 - z) * x + z * h``
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        # W_r, W_z and W_g; U_r and U_z; U_g.
        self.of_branch = nn.Linear(d_model, 3 * d_model, bias=False)
        self.of_stream = nn.Linear(d_model, 2 * d_model, bias=False)
        self.of_reset_stream = nn.Linear(d_model, d_model, bias=False)
        self.bias = nn.Parameter(torch.full((d_model,), GATE_BIAS))

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        """``x'`` of the stream ``x`` and a sub-layer's output, all ``[..., D]``."""
        reset, update, candidate = self.of_branch(branch.relu()).chunk(3, -1)
        own_reset, own_update = self.of_stream(x).chunk(2, -1)
        r = (reset + own_reset).sigmoid()
        z = (update + own_update - self.bias).sigmoid()
        return x + z * ((candidate + self.of_reset_stream(r * x)).tanh() - x)  # type: ignore[no-any-return]


class RelativeLayer(nn.Module):
    """Attention and feed-forward sub-layers, each with its norm and its residual sum or gate."""

    attention: RelativeAttention

    def __init__(
        self, config: RelativeConfig, attention: RelativeAttention, epsilon: float = 1e-5
    ) -> None:
        super().__init__()
        self.pre = config.normalisation == "pre"
        self.attention = attention
        self.feed_forward = FeedForward(
            config.d_model, config.d_ff, config.activation, config.dropout
        )
        self.attention_norm = nn.LayerNorm(config.d_model, epsilon)
        self.feed_forward_norm = nn.LayerNorm(config.d_model, epsilon)
        self.dropout = dropout_layer(config.dropout)
        self.attention_gate: nn.Module | None = None
        self.feed_forward_gate: nn.Module | None = None
        if config.gating == "gru":
            self.attention_gate = GRUGate(config.d_model)
            self.feed_forward_gate = GRUGate(config.d_model)

    @property
    def input_norm(self) -> nn.Module | None:
        """The norm before queries, keys and values, of ``x`` and memory: that of pre-norm layers."""
        return self.attention_norm if self.pre else None

    def residual(self, x: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer: residual sums or gates, norms and feed-forward, ``[B, T, D]``."""
        if self.pre:
            x = self._joined(x, attended, self.attention_gate)
            fed = self.feed_forward(self.feed_forward_norm(x))
            return self._joined(x, fed, self.feed_forward_gate)
        x = self.attention_norm(x + self.dropout(attended))
        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))  # type: ignore[no-any-return]

    def _joined(self, x: Tensor, branch: Tensor, gate: nn.Module | None) -> Tensor:
        branch = self.dropout(branch)
        return x + branch if gate is None else gate(x, branch)
