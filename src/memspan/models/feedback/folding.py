"""A Feedback Transformer's weights as its fast loops take them, with constants multiplied in."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from memspan.ops.feedback.buffers import FoldedWeights

if TYPE_CHECKING:
    from memspan.models.feedback.model import Feedback


def fold(backbone: Feedback, span: int) -> FoldedWeights:
    """Fold the weights of all layers for a span of ``span`` tokens. Gradients flow through."""
    layers = list(backbone.stack())
    heads = (backbone.config.n_heads, backbone.config.head_width)
    scale = backbone.config.head_width**-0.5

    def stacked(name: str) -> Tensor:
        return torch.stack([attrgetter(name)(layer) for layer in layers])

    def with_bias(weight: Tensor, bias: list[Tensor | None]) -> Tensor:
        rows = [weight.new_zeros(weight.shape[1]) if b is None else b for b in bias]
        return torch.cat([weight.transpose(1, 2), torch.stack(rows)[:, None]], 1)

    query = stacked("query.weight")
    u = stacked("content_bias")
    gain = stacked("attention_norm.weight")
    bias = stacked("attention_norm.bias")
    ff_gain = stacked("feed_forward_norm.weight")
    ff_bias = stacked("feed_forward_norm.bias")
    gains = biases = gain.new_empty(0)
    if backbone.config.normalisation == "post":
        gains = torch.stack([gain, ff_gain])
        biases = torch.stack([bias, ff_bias])
        # Nothing to fold: what the sub-layers are given is not normalised.
        gain, ff_gain = torch.ones_like(gains)
        bias, ff_bias = torch.zeros_like(biases)
    query_bias = (query @ bias[:, :, None]).squeeze(2) + u.flatten(1)
    # Farthest first: the nearest keys are then a slice at the end.
    r = stacked("position_keys")[:, :span].flip(1)
    s = stacked("position_scores")[:, :span].flip(1)
    s = s - torch.einsum("lhk,lshk->lsh", u, r)
    inner = stacked("feed_forward.inner.weight")
    kv = [*backbone.key, *backbone.value]
    kv_bias = torch.cat(
        [p.weight.new_zeros(len(p.weight)) if p.bias is None else p.bias for p in kv]
    )
    kv_weight = torch.cat([projection.weight for projection in kv])
    norm = backbone.memory_norm
    if isinstance(norm, nn.LayerNorm):
        kv_bias = kv_bias + kv_weight @ norm.bias
        kv_weight = kv_weight * norm.weight
    return FoldedWeights(
        query=(scale * query * gain[:, None]).unflatten(1, heads).transpose(2, 3),
        query_bias=(scale * query_bias).unflatten(1, (heads[0], 1, heads[1])),
        position_keys=r.permute(0, 2, 3, 1).contiguous(),
        position_scores=(scale * s).transpose(1, 2).unsqueeze(2),
        output=with_bias(stacked("output.weight"), [layer.output.bias for layer in layers]),
        inner=(inner * ff_gain[:, None]).transpose(1, 2),
        inner_bias=stacked("feed_forward.inner.bias") + (inner @ ff_bias[:, :, None]).squeeze(2),
        outer=with_bias(
            stacked("feed_forward.outer.weight"),
            [layer.feed_forward.outer.bias for layer in layers],
        ),
        memory=kv_weight.t(),
        memory_bias=kv_bias,
        mix=backbone.mix(),
        gains=gains,
        biases=biases,
        norms_memory=isinstance(norm, nn.LayerNorm),
    )
