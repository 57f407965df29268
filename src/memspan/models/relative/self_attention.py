"""What layers with a memory of hidden states share: Transformer-XL's and the Compressive Transformer's.

Multi-head self-attention over a memory and a segment with relative positions, around
:func:`memspan.ops.relative.relative_attention`, and the layer around it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from memspan.errors import MemspanError
from memspan.nn import FeedForward, dropout_layer, known, sinusoids
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
        limit, rows = self.largest_code(n_distances, slots), config.max_distance
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
    ) -> Tensor:
        """Mask ``[B, T, N + T]``: the right-most ``used [B]`` of N old columns, the segment's past.

        ``slots``: the memory's size, N where no column is left out. ``documents``: the segment's.
        """
        query = torch.arange(n_old, n_old + n_queries, device=used.device)[:, None]
        key = torch.arange(n_old + n_queries, device=used.device)
        mask = key <= query
        if self.attention == "fixed":
            mask = mask & (query - key < slots)
        mask = mask & (key >= n_old - used[:, None, None])
        return mask if documents is None else documents.mask(mask)


@dataclass(frozen=True)
class AttentionPass:
    """What the attention of all layers shares in one pass."""

    codes: Tensor
    """Codes of the distances, see :meth:`Span.codes`."""
    mask: Tensor
    """Bool ``[B, T, S]``."""
    implementation: str | None
    """See :func:`relative_attention`."""
    weights: list[Tensor] | None = None
    """A list that receives each layer's attention weights ``[B, H, T, S]`` (None: not wanted)."""
    documents: Documents | None = None
    """Those of the segment."""


@known("n_heads", "head_width")
class RelativeSelfAttention(nn.Module):
    """Queries from the segment, keys and values from memory and segment (Dai et al. 2019, section 3.3).

    The biases ``u`` and ``v`` belong to the stack, which may share them over its layers.
    """

    def __init__(self, config: RelativeConfig) -> None:
        super().__init__()
        self.n_heads, self.head_width = config.n_heads, config.head_width
        self.dropout = config.attention_dropout
        d_model, inner, bias = config.d_model, self.n_heads * self.head_width, config.attention_bias
        self.query = nn.Linear(d_model, inner, bias=False)
        self.key = nn.Linear(d_model, inner, bias=False)
        self.value = nn.Linear(d_model, inner, bias=bias)
        self.output = nn.Linear(inner, d_model, bias=bias)
        rows = config.max_distance
        if config.positions == "sinusoidal":
            self.position = nn.Linear(d_model, inner, bias=False)
        elif rows is None:
            raise MemspanError(
                "learned positions need a table size: set max_distance to the longest span in "
                "use, memory and segment together"
            )
        else:
            self.position_keys = nn.Parameter(torch.zeros(rows, self.n_heads, self.head_width))
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
        shared: AttentionPass,
        biases: tuple[Tensor, Tensor | None],
        received: Tensor | None = None,
    ) -> Tensor:
        """The sub-layer's output ``[B, T, D]`` from what :meth:`project` returned.

        Args:
            q: queries ``[B, H, T, K]``.
            k: keys ``[B, H, S, K]`` of memory and segment; ``v`` likewise.
            shared: what all layers share in this pass.
            biases: ``u`` and ``v``, ``[H, K]`` each; ``v`` only with sinusoidal positions.
            received: ``[B, S]``; the attention that each key receives is added to it.
        """
        keys, scores = self.distances(shared.codes)
        positions = Positions(keys, scores, *biases)
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
        return self.output(attended.transpose(1, 2).flatten(2))


def newest(old: Tensor, x: Tensor, documents: Documents | None = None) -> Tensor:
    """The last ``M`` columns of ``old [B, M, D]`` and ``x [B, T, D]``, before each row's padding.

    Columns that are not among them are not copied: a pass keeps those of all layers until its end.
    """
    slots, n_tokens = old.shape[1], x.shape[1]
    if documents is not None:
        return documents.newest(torch.cat([old, x], 1), slots)
    if n_tokens < slots:
        return torch.cat([old[:, n_tokens:], x], 1)
    return x[:, n_tokens - slots :]


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


@known("pre")
class RelativeLayer(nn.Module):
    """Attention and feed-forward sub-layers, each with its norm and its residual sum or gate."""

    attention_type: type[RelativeSelfAttention] = RelativeSelfAttention

    def __init__(self, config: RelativeConfig, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.pre = config.normalisation == "pre"
        self.attention = self.attention_type(config)
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

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        shared: AttentionPass,
        biases: tuple[Tensor, Tensor | None],
    ) -> Tensor:
        """Read ``x [B, T, D]`` after this layer's ``memory [B, M, D]``."""
        attended = self.attention.attend(*self.project(x, memory), shared, biases)
        return self.residual(x, attended)

    @property
    def input_norm(self) -> nn.Module | None:
        """What ``x`` and memory pass before they are projected: the norm of pre-norm layers."""
        return self.attention_norm if self.pre else None

    def normalise_context(self, context: Tensor) -> Tensor:
        """What keys and values are computed from: with pre-norm, the normalised context."""
        return self.attention_norm(context) if self.pre else context

    def project(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of ``x``, keys and values of ``memory`` and ``x``, per head."""
        return self.attention.project(self.normalise_context(x), self.normalise_context(memory))

    def residual(self, x: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer: residual sums or gates, norms and feed-forward, ``[B, T, D]``."""
        if self.pre:
            x = self._joined(x, attended, self.attention_gate)
            fed = self.feed_forward(self.feed_forward_norm(x))
            return self._joined(x, fed, self.feed_forward_gate)
        x = self.attention_norm(x + self.dropout(attended))
        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))

    def _joined(self, x: Tensor, branch: Tensor, gate: nn.Module | None) -> Tensor:
        branch = self.dropout(branch)
        return x + branch if gate is None else gate(x, branch)


class AttentionAlone(RelativeSelfAttention):
    """Attention with what otherwise a stack gives it: the biases ``u`` and ``v``, codes and a mask."""

    def __init__(self, config: RelativeConfig) -> None:
        super().__init__(config)
        self.config = config
        heads = (self.n_heads, self.head_width)
        self.content_bias = nn.Parameter(torch.zeros(heads))
        sinusoidal = config.positions == "sinusoidal"
        self.position_bias = nn.Parameter(torch.zeros(heads)) if sinusoidal else None
        self.code_dropout = dropout_layer(config.dropout)

    def read(
        self,
        x: Tensor,
        old: Tensor,
        used: Tensor,
        norm: nn.Module | None,
        implementation: str | None,
        received: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Attend from ``x [B, T, D]`` to the right-most ``used [B]`` of ``old [B, N, D]`` and to ``x``,
        both after ``norm``.

        Returns the output ``[B, T, D]``, and the queries, keys and values of :meth:`project`.
        """
        (n_tokens, slots), config = (x.shape[1], old.shape[1]), self.config
        span = Span(config.attention_span, config.clamp_length)
        codes = span.codes(config, slots + n_tokens, slots, self.content_bias)
        codes = self.code_dropout(codes) if codes.is_floating_point() else codes
        mask = span.visible(used, n_tokens, slots, slots)
        shared = AttentionPass(codes, mask, implementation)
        projected = self.project(*(t if norm is None else norm(t) for t in (x, old)))
        biases = self.content_bias, self.position_bias
        return self.attend(*projected, shared, biases, received), projected
