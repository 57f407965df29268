"""One layer of Fast Weights (Schlag, Irie, Schmidhuber 2021, sections 3 and 4), and its memory.

Projections, feature map and update rule, and the feed-forward sub-layer around them; the maps and rules
themselves are in :mod:`memspan.ops.fast_weights`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memspan.errors import MemspanError
from memspan.models.known import known
from memspan.nn import FeedForward, dropout_layer
from memspan.ops.fast_weights.feature_maps import (
    DPFP,
    elu_plus_one,
    favor,
    in_plain_autograd,
    orthogonal_projection,
    sum_to_one,
)
from memspan.ops.fast_weights.rules import Chunking, delta_rule, outer_product_rule, sum_rule
from memspan.trees import LayerMemory, a_weight, check_config, check_layer

if TYPE_CHECKING:
    from memspan.models.fast_weights.config import FastWeightsConfig
    from memspan.models.segments import Documents


@dataclass(frozen=True, repr=False)
class FastWeightsLayerMemory(LayerMemory):
    """The fast weights of one layer, in float32 or better."""

    weights: Tensor
    """``[B, H, F, V]``: features by values, the paper's W transposed."""
    key_sum: Tensor
    """``z``, the sum of all keys, ``[B, H, F]`` with normalisation attention; else ``F`` is 0."""


@known("config", "n_heads")
class FastWeightsAttention(nn.Module):
    """Projections, feature map and one of the update rules: attention without a residual or a norm.

    Args:
        config: its width, heads, rule and feature map; what concerns other parts of a model, such as
            ``n_layers``, is not looked at.
    """

    projection: Tensor

    def __init__(self, config: FastWeightsConfig) -> None:
        check_config(self, config, "FastWeightsConfig")
        super().__init__()
        self.config = config
        self.n_heads = config.n_heads
        inner = config.n_heads * config.head_width
        # The outer-product rule reads with the input itself.
        if config.rule != "outer-product":
            self.query = nn.Linear(config.d_model, inner, bias=False)
        self.key = nn.Linear(config.d_model, inner, bias=False)
        self.value = nn.Linear(config.d_model, inner, bias=False)
        if config.rule == "delta":
            self.beta = nn.Linear(config.d_model, config.n_heads, bias=False)
        names = {"outer-product": ("key", "value"), "sum": ("query", "key", "value")}
        self.products = names.get(config.rule, ("query", "key", "value", "beta"))
        self.output = nn.Linear(inner, config.d_model)
        if config.feature_map == "favor":
            self.register_buffer("projection", self.draw_projection())

    def draw_projection(self) -> Tensor:
        """New random projections ``[K, m]`` for favor."""
        return orthogonal_projection(self.config.head_width, self.config.n_projections)

    def heads(self, x: Tensor) -> Tensor:
        """``[B, T, H*K] -> [B, H, T, K]``."""
        return x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys, values ``[B, H, T, K]``; with the delta rule, beta's logits ``[B, H, T]``."""
        from memspan.models.packing import are_joined

        projections = [getattr(self, name) for name in self.products]
        if are_joined(projections):
            widths = [projection.out_features for projection in projections]
            parts = list(F.linear(x, self.fused_weight()).split(widths, -1))
        else:
            parts = [projection(x) for projection in projections]
        if self.config.rule == "outer-product":
            parts.insert(0, x)
        q, k, v = (self.heads(part) for part in parts[:3])
        return q, k, v, parts[3].transpose(1, 2) if len(parts) > 3 else None

    def fused_weight(self) -> Tensor:
        """The weights of all projections as one matrix, in the order query, key, value, beta."""
        return torch.cat([getattr(self, name).weight for name in self.products])

    def feature_map(self) -> Callable[[Tensor], Tensor]:
        """Feature map and sum normalisation: ``[..., K] -> [..., F]``."""
        epsilon = self.config.epsilon if self.config.normalisation == "sum" else None
        if self.config.feature_map == "dpfp":
            return DPFP(self.config.nu, epsilon)
        return partial(self._features, epsilon=epsilon)

    def features(self, x: Tensor) -> Tensor:
        """The features of keys or queries: ``[..., K] -> [..., F]``."""
        return self.feature_map()(x)

    def _features(self, x: Tensor, epsilon: float | None) -> Tensor:
        kind = self.config.feature_map
        if kind == "elu":
            x = elu_plus_one(x)
        elif kind == "favor":
            x = favor(x, self.projection.to(x.dtype))
        elif kind == "softmax":
            x = x.softmax(-1)
        return x if epsilon is None else sum_to_one(x, epsilon)

    def initial_memory(self, batch_size: int) -> FastWeightsLayerMemory:
        """A memory before the first token, in float32 or better."""
        return FastWeightsLayerMemory.zeros(a_weight(self), batch_size, row_sizes(self.config))

    def forward(
        self,
        x: Tensor,
        memory: FastWeightsLayerMemory | None = None,
        implementation: str | None = None,
        documents: Documents | None = None,
    ) -> tuple[Tensor, FastWeightsLayerMemory]:
        """Read ``x [B, T, D]`` after ``memory`` (None: nothing was read), which is not changed: the
        output ``[B, T, D]``, and the memory after the segment. ``implementation``: see
        :func:`memspan.ops.delta_rule`. ``documents``: those of the segment (None: it is one, read on).

        Raises:
            MemspanError: shapes, types or devices do not go together.
        """
        memory = check_layer(self, x, self.config.d_model, memory)
        weights = memory.weights
        key_sum = memory.key_sum
        q, k, v, beta = self.project(x)
        # Sums over thousands of tokens need float32, whatever precision the products have.
        q, k, v = (t.to(weights.dtype) for t in (q, k, v))
        with torch.autocast(x.device.type, enabled=False):
            y, weights, key_sum = self.write_and_read(
                q, k, v, beta, weights, key_sum, implementation, documents
            )
        y = self.output(y.transpose(1, 2).flatten(2).to(x.dtype))
        return y, FastWeightsLayerMemory(weights, key_sum)

    def write_and_read(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor | None,
        weights: Tensor,
        key_sum: Tensor,
        implementation: str | None = None,
        documents: Documents | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The update rule over a segment, divided as attention normalisation asks.

        Arguments are as :meth:`project` and :meth:`forward` have them; returns ``y [B, H, T, V]``, and
        weights and key sum after the segment.
        """
        config = self.config
        starts = None if documents is None else documents.begins
        # Values of one, and zero in padding, which writes nothing.
        ones = torch.ones_like(v[..., :1])
        if documents is not None:
            ones = ones * documents.own()[:, None, :, None]
            v = v * ones
        if config.rule == "outer-product":
            if implementation not in (None, "reference"):
                raise MemspanError(
                    f"the outer-product rule has no {implementation} implementation: use the reference"
                )
            y, weights = outer_product_rule(
                q,
                k,
                v,
                weights,
                activation=config.outer_activation,
                starts=starts,
                lengths=None if documents is None else documents.lengths,
            )
            return y, weights, key_sum
        options: Any = {
            "feature_map": self.feature_map(),
            "chunking": Chunking(config.chunk_size, config.recompute and torch.is_grad_enabled()),
            "implementation": implementation,
            "starts": starts,
        }
        if beta is not None:
            beta = beta.to(weights.dtype).sigmoid()
            beta = beta if documents is None else beta * ones[..., 0]
        if config.normalisation != "attention":
            if beta is not None:
                y, weights = delta_rule(q, k, v, beta, weights, **options)
            else:
                y, weights = sum_rule(q, k, v, weights, **options)
            return y, weights, key_sum
        # z follows the sum rule with values of one.
        z = key_sum.unsqueeze(-1)
        if beta is None:
            y, after = sum_rule(
                q, k, torch.cat([v, ones], -1), torch.cat([weights, z], -1), **options
            )
            y, by_query = y[..., :-1], y[..., -1:]
            weights = after[..., :-1]
            after = after[..., -1:]
        else:
            features = options.pop("feature_map")
            features = in_plain_autograd(features) if implementation == "reference" else features
            q = features(q)
            k = features(k)
            by_query, after = sum_rule(q, k, ones, z, **options)
            # Over earlier keys only. Subtracting a key's own part from a sum that includes it would
            # leave a rounding error, and the first token would divide by that.
            earlier = F.pad(k, (0, 0, 1, 0))[:, :, :-1]
            if starts is not None:
                earlier = earlier.masked_fill(starts[:, None, :, None], 0)
            by_key, _ = sum_rule(k, earlier, ones, z, **options)
            overlap = self.overlap(by_key)
            y, weights = delta_rule(q, k / overlap, v, beta * overlap[..., 0], weights, **options)
        return y / (by_query + config.epsilon), weights, after.squeeze(-1)

    def retention(self, x: Tensor, key_sum: Tensor) -> Tensor:
        """The share of the first token's value that its key still retrieves after 0, 1, 2, ... further
        tokens: ``[B, H, T]``.

        The rules are linear in W, so what one token wrote can be followed by itself. With the delta
        rule it fades along its features ``f`` as ``a <- a - beta k (k . a)`` from ``a = f``; the share
        is ``a . f / f . f``.

        Args:
            x: ``[B, T, D]``; the first token is the one that is followed.
            key_sum: the sum of keys before the segment, ``[B, H, F]``.
        """
        _, k, _, beta = self.project(x)
        keys = self.features(k.to(key_sum.dtype))
        divides = self.config.normalisation == "attention"
        # z after each token, its own key included.
        z = key_sum[:, :, None] + keys.cumsum(2) if divides else keys
        first = keys[:, :, 0]
        left = first
        shares = []
        for t, key in enumerate(keys.unbind(2)):
            if t and beta is not None:
                strength = beta[:, :, t].to(keys.dtype).sigmoid()[..., None]
                if divides:
                    strength = strength / self.overlap((z[:, :, t - 1] * key).sum(-1, keepdim=True))
                left = left - strength * key * (key * left).sum(-1, keepdim=True)
            shares.append((left * first).sum(-1))
        # A key whose features are all zero writes nothing: its share is 0.
        tiny = torch.finfo(keys.dtype).tiny
        share = torch.stack(shares, -1) / (first * first).sum(-1, keepdim=True).clamp(min=tiny)
        if divides:
            by_query = (z * first[:, :, None]).sum(-1) + self.config.epsilon
            share = share * by_query[..., :1] / by_query
        return share

    def overlap(self, z_k: Tensor) -> Tensor:
        """``z(t-1) . k``, by which attention normalisation divides a key's old value.

        1 where it is at most epsilon: then no earlier key shares a feature with this one, and the old
        value is also 0. No term is negative, so an empty sum is exactly 0.
        """
        # Not z_k > epsilon, which would replace NaN by 1.
        return torch.where(z_k <= self.config.epsilon, 1.0, z_k)


@known("post")
class FastWeightsLayer(nn.Module):
    """Attention and feed-forward sub-layers, each with a residual; ``config.norm`` places the norms.

    Args:
        config: as of :class:`FastWeightsAttention`, and the feed-forward's width, norms and dropout.
    """

    def __init__(self, config: FastWeightsConfig) -> None:
        check_config(self, config, "FastWeightsConfig")
        super().__init__()
        self.attention = FastWeightsAttention(config)
        self.feed_forward = FeedForward(
            config.d_model, config.d_ff, config.activation, config.dropout
        )
        self.post = config.norm == "post"
        alone = config.norm == "feed-forward"
        self.attention_norm = nn.Identity() if alone else nn.LayerNorm(config.d_model)
        self.feed_forward_norm = nn.LayerNorm(config.d_model)
        self.dropout = dropout_layer(config.dropout)

    def before_attention(self, x: Tensor) -> Tensor:
        """The input of the attention, ``[B, T, D]``."""
        return x if self.post else self.attention_norm(x)

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        """The layer's output ``[B, T, D]`` from its input and the attention's output."""
        x = x + self.dropout(attended)
        if self.post:
            x = self.attention_norm(x)
            return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))

    def initial_memory(self, batch_size: int) -> FastWeightsLayerMemory:
        """A memory before the first token, in float32 or better."""
        return self.attention.initial_memory(batch_size)

    def forward(
        self,
        x: Tensor,
        memory: FastWeightsLayerMemory | None = None,
        implementation: str | None = None,
        documents: Documents | None = None,
    ) -> tuple[Tensor, FastWeightsLayerMemory]:
        """Read a segment: arguments, results and errors as in :meth:`FastWeightsAttention.forward`."""
        memory = check_layer(self, x, self.attention.config.d_model, memory)
        given = (memory, implementation, documents)
        attended, memory = self.attention(self.before_attention(x), *given)
        return self.after_attention(x, attended), memory


def row_sizes(config: FastWeightsConfig) -> dict[str, tuple[int, ...]]:
    """The sizes of one row of a layer's memory."""
    features = config.feature_width
    heads = config.n_heads
    sums = features if config.normalisation == "attention" else 0
    return {"weights": (heads, features, config.head_width), "key_sum": (heads, sums)}
