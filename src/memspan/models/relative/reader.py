"""What readers of architectures with relative positions compute once, the weights being frozen."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from memspan.models.protocol import M
from memspan.models.relative.self_attention import RelativeBackbone, RelativeLayer, Span
from memspan.ops.relative_attention import Positions, attend_one, relative_attention


class ReaderAttention:
    """Attention with frozen weights: what readers compute once and keep.

    Query, key and value are one product with ``u`` as the query's bias; the distances are projected
    once, and again only if a longer segment comes.
    """

    def __init__(
        self, layers: list[RelativeLayer], backbone: RelativeBackbone[M], span: Span
    ) -> None:
        self.layers, self.backbone, self.span = layers, backbone, span
        self._weights = [
            _fused_projection(layers[n], backbone.biases(n)[0]) for n in range(len(layers))
        ]
        # Of every layer, for the distances covered so far: R and (v - u).R + S, nearest first, and
        # both again farthest first, the order in which decoding needs them.
        self._nearest_first: list[tuple[Tensor, Tensor]] = []
        self._farthest_first: list[tuple[Tensor, Tensor]] = []
        self._covered = 0

    def project(self, n: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Layer ``n``'s queries, keys and values of ``x [B, T, D]``, ``[B, H, T, K]`` each."""
        layer = self.layers[n]
        projected = F.linear(layer.normalise_context(x), *self._weights[n])
        q, k, v = layer.attention.heads(projected).chunk(3, 1)
        return q, k, v

    def keys_and_values(self, n: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Layer ``n``'s keys and values of slots ``[B, N, D]``, ``[B, H, N, K]`` each."""
        attention = self.layers[n].attention
        context = self.layers[n].normalise_context(hidden.to(self.backbone.content_bias.dtype))
        return attention.heads(attention.key(context)), attention.heads(attention.value(context))

    def cover(self, n_distances: int, slots: int) -> None:
        """Project the distances up to ``n_distances - 1``, where they are not yet."""
        if n_distances <= self._covered:
            return
        codes = self.backbone.position_codes(n_distances, slots, self.span)
        self._nearest_first, self._farthest_first, self._covered = [], [], n_distances
        for n, layer in enumerate(self.layers):
            keys, scores = layer.attention.distances(codes)
            u, v = self.backbone.biases(n)
            # The projected query holds u already: what is left of v is v - u.
            shift = -u if v is None else v - u
            by_distance = (keys @ shift[:, :, None]).squeeze(-1)
            scores = by_distance if scores is None else by_distance + scores
            self._nearest_first.append((keys.contiguous(), scores))
            self._farthest_first.append((keys.flip(1), scores.flip(1)))

    def attend(
        self,
        n: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        received: Tensor | None = None,
    ) -> Tensor:
        """Layer ``n``'s attention sub-layer, ``[B, T, D]``, over covered distances."""
        n_keys = k.shape[2]
        if q.shape[2] != 1 or received is not None:
            keys, scores = self._nearest_first[n]
            positions = Positions(keys[:, :n_keys], scores[:, :n_keys])
            attended = relative_attention(q, k, v, positions, mask=mask, received=received)
        else:
            keys, scores = self._farthest_first[n]
            start = self._covered - n_keys
            one = None if mask is None else mask[:, 0]
            attended = attend_one(
                q.squeeze(2), k, v, keys[:, start:], scores[:, start:], one
            ).unsqueeze(2)
        return self.layers[n].attention.output(attended.transpose(1, 2).flatten(2))


def _fused_projection(layer: RelativeLayer, content_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Query, key and value weights as one, with ``u`` as the query's bias."""
    attention = layer.attention
    zero = torch.zeros_like(content_bias.flatten())
    value_bias = zero if attention.value.bias is None else attention.value.bias
    weights = [attention.query.weight, attention.key.weight, attention.value.weight]
    return torch.cat(weights), torch.cat([content_bias.flatten(), zero, value_bias])
