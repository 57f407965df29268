"""One layer of the Feedback Transformer (Fan et al. 2020, arXiv 2002.09402), and what a token writes.

All layers attend to one memory: a vector ``m`` of each of the last ``S`` tokens. Token ``t``, whose
embedding is ``x^0``, goes through layers ``l = 0 .. L - 1``, and then its own vector is made::

    k_j, v_j = W_k m_j, W_v m_j                           j = t - S .. t - 1
    q = W_q x^l
    A_j = ( (q + u) . k_j + q . R_(t-j) + S_(t-j) ) / sqrt(K)
    z = x^l + W_o softmax_j(A) v
    x^(l+1) = z + FF(z)
    m_t = sum_l softmax(w)_l x^l                          l = 0 .. L

``W_k`` and ``W_v`` are the stack's, since by default all layers share them; all else has one of each
layer. With pre-norm ``q`` and ``FF`` are given normalised states, and ``W_k`` and ``W_v`` normalised
vectors; with post-norm each sum is normalised. Scores and learned spans:
:mod:`memspan.ops.feedback.attention`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from memspan.models.known import known
from memspan.nn import FeedForward
from memspan.ops.feedback.attention import Distances, feedback_attention, span_mask
from memspan.ops.feedback.dropout import NO_DROPOUT, Dropout, drop

if TYPE_CHECKING:
    from memspan.models.feedback.config import FeedbackConfig

Projected = tuple[list[Tensor], list[Tensor]]
"""Keys and values of one token: lists over layers of ``[B, H, K]``."""


@known("pre", "head_width", "longest_span", "span_ramp")
class FeedbackLayer(nn.Module):
    """Attention to memory vectors and feed-forward, each with its residual and norm."""

    def __init__(self, config: FeedbackConfig) -> None:
        super().__init__()
        self.pre = config.normalisation == "pre"
        self.head_width = config.head_width
        inner = config.n_heads * config.head_width
        self.query = nn.Linear(config.d_model, inner, bias=False)
        self.output = nn.Linear(inner, config.d_model, bias=config.attention_bias)
        heads = (config.n_heads, config.head_width)
        self.content_bias = nn.Parameter(torch.zeros(heads))
        self.position_keys = nn.Parameter(torch.empty(config.table_rows, *heads))
        self.position_scores = nn.Parameter(torch.empty(config.table_rows, config.n_heads))
        # Each head's span, as a fraction of the longest.
        self.span_ratio = (
            None if config.adaptive_span is None else nn.Parameter(torch.zeros(config.n_heads))
        )
        self.longest_span = config.memory_length
        self.span_ramp = config.span_ramp
        # The stack draws this dropout for all layers and tokens at once.
        self.feed_forward = FeedForward(config.d_model, config.d_ff, config.activation, 0.0)
        self.attention_norm = nn.LayerNorm(config.d_model)
        self.feed_forward_norm = nn.LayerNorm(config.d_model)

    def span_mask(self) -> Tensor | None:
        """The factor on attention at each distance, ``[H, P]``; None where spans are not learned."""
        if self.span_ratio is None:
            return None
        # Clamped in value only: the gradient passes, so that a ratio outside 0 .. 1 can return.
        ratio = self.span_ratio + (self.span_ratio.clamp(0, 1) - self.span_ratio).detach()
        return span_mask(self.longest_span * ratio, self.span_ramp, len(self.position_scores))

    def forward(
        self,
        x: Tensor,
        keys: Tensor,
        values: Tensor,
        visible: Tensor,
        span_mask: Tensor | None,
        factors: Dropout = NO_DROPOUT,
        attention_weights: list[Tensor] | None = None,
    ) -> Tensor:
        """Read one token per row: ``[B, D] -> [B, D]``.

        Args:
            x: the layer's input, ``[B, D]``.
            keys: of the memory vectors, ``[B, H, S, K]``; ``values``: in the same shape.
            visible: bool ``[B, S]``, the valid slots. Where a row has none, attention adds zero.
            span_mask: what :meth:`span_mask` returns, computed once for many tokens.
            factors: of dropout, for this token and layer.
            attention_weights: a list that receives the attention weights ``[B, H, S]``.
        """
        z = self.attention_norm(x) if self.pre else x
        attended = feedback_attention(
            self.query(z).unflatten(-1, (-1, self.head_width)),
            keys,
            values,
            Distances(self.position_keys, self.position_scores, span_mask),
            self.content_bias,
            visible,
            factors.weights,
            attention_weights,
        )
        attended = self.output(attended.flatten(1)) * visible.any(-1, keepdim=True)
        x = x + drop(attended, factors.attention)
        if not self.pre:
            x = self.attention_norm(x)
        z = self.feed_forward_norm(x) if self.pre else x
        # Another module in its place may take no factors.
        given = (z,) if factors.activated is None else (z, factors.activated)
        x = x + drop(self.feed_forward(*given), factors.feed_forward)
        return x if self.pre else self.feed_forward_norm(x)


class FeedbackStep(nn.Module):
    """One token through a stack of layers, and what it writes to memory; a base of the stack.

    The parameters are the stack's, and bear the names that they have there.
    """

    config: FeedbackConfig
    layers: nn.ModuleList
    """The :class:`FeedbackLayer` s."""
    key: nn.ModuleList
    """``W_k``: one that all layers share, or one of each."""
    value: nn.ModuleList
    """``W_v``, likewise."""
    memory_norm: nn.Module
    """Applied to memory vectors before ``W_k`` and ``W_v``."""
    layer_weights: nn.Parameter | None
    """``w``, ``[L + 1]``, where it is learned."""

    def stack(self) -> Iterator[FeedbackLayer]:
        """The layers, first to last, as :class:`FeedbackLayer`."""
        return iter(self.layers)  # type: ignore[arg-type]

    def step(
        self,
        x: Tensor,
        past: Sequence[Projected],
        visible: Tensor,
        mix: Tensor,
        span_masks: Sequence[Tensor | None],
        factors: Sequence[Dropout],
        attention_weights: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Projected]:
        """Read one token per row: the last layer's state ``[B, D]``, the memory vector ``[B, D]``, and
        its keys and values.

        Args:
            x: embeddings, ``[B, D]``.
            past: keys and values of the slots, oldest first.
            visible: bool ``[B, S]``, the valid slots.
            mix: of :meth:`mix`, computed once for many tokens.
            span_masks: each layer's :meth:`FeedbackLayer.span_mask`, also computed once.
            factors: of dropout, for this token and each layer.
            attention_weights: a list that receives the attention weights ``[B, H, S]`` of each layer.
        """
        states = [x]
        for n, layer in enumerate(self.stack()):
            keys = torch.stack([keys[n] for keys, _ in past], 2)
            values = torch.stack([values[n] for _, values in past], 2)
            given = (keys, values, visible, span_masks[n], factors[n], attention_weights)
            states.append(layer(states[-1], *given))
        # Not a matrix product, which autocast would round: memory keeps full precision.
        vector = (mix[:, None, None] * torch.stack(states)).sum(0)
        return states[-1], vector, self.project(vector)

    def mix(self) -> Tensor:
        """Weights ``[L + 1]`` of a token's states in its memory vector, the embedding's first."""
        n_states = len(self.layers) + 1
        if self.layer_weights is not None:
            return self.layer_weights.softmax(0)
        one = next(self.stack()).content_bias
        if self.config.memory_vector == "last":
            return torch.cat([one.new_zeros(n_states - 1), one.new_ones(1)])
        return one.new_full((n_states,), 1 / n_states)

    def project(self, vectors: Tensor) -> Projected:
        """Keys and values of memory vectors ``[B, D]``."""
        heads = (-1, self.config.head_width)
        vectors = self.memory_norm(vectors)
        keys = [projection(vectors).unflatten(-1, heads) for projection in self.key]
        values = [projection(vectors).unflatten(-1, heads) for projection in self.value]
        repeats = len(self.layers) // len(keys)
        return keys * repeats, values * repeats


def first_layer_weights(config: FeedbackConfig) -> Tensor:
    """``[L + 1]``, before the softmax; ``scaled`` gives the embedding a share of 10/11 at any depth.

    With equal shares, what the upper layers learn for all tokens alike hides which token it was
    (docs/measured/feedback.md, "Recall over distance").
    """
    weights = torch.zeros(config.n_layers + 1)
    if config.initialisation == "scaled":
        weights[0] = math.log(10 * config.n_layers)
    return weights
