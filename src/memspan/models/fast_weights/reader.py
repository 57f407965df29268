"""The reader of Fast Weights, which updates its memory in place."""

from __future__ import annotations

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from memspan.models.fast_weights.layer import FastWeightsLayer, FastWeightsLayerMemory
from memspan.models.fast_weights.model import FastWeights, FastWeightsMemory
from memspan.models.in_place import InPlaceReader, refuse_non_finite
from memspan.models.one_token import packed_stack
from memspan.ops.fast_weights import compiled as delta_rule_loop
from memspan.ops.fast_weights.feature_maps import DPFP
from memspan.ops.fast_weights.one_token import CompiledStep


class FastWeightsReader(InPlaceReader[FastWeightsMemory]):
    """Reads a stream without gradients, with constant memory and time per token. A single token takes
    one call to the loop in C where that can run, otherwise a few tensor operations per layer."""

    def __init__(self, backbone: FastWeights, memory: FastWeightsMemory) -> None:
        super().__init__(backbone, memory, ("weights", "key_sum"))
        self.backbone = backbone
        self._weights = self._layers["weights"]
        self._key_sums = self._layers["key_sum"]

    @cached_property
    def _projections(self) -> list[Tensor]:
        """Each layer's, made when the first single token is read."""
        return [layer.attention.fused_weight() for layer in self.backbone.stack()]

    @cached_property
    def _step(self) -> CompiledStep | None:
        """The loop in C, if it supports these options and can run here."""
        backbone = self.backbone
        config = self.backbone.config
        dpfp = next(backbone.stack()).attention.feature_map()
        if (
            not isinstance(dpfp, DPFP)
            or config.normalisation == "attention"
            or config.norm == "post"
            or next(backbone.parameters()).dtype != self._dtype
            or not delta_rule_loop.available(self._weights[0])
        ):
            return None
        stack = packed_stack(
            delta_rule_loop.SOURCE,
            backbone.stack(),
            [{"projections": weight} for weight in self._projections],
            backbone.final_norm,
            n_heads=config.n_heads,
            batch=self._rows.count,
        )
        return CompiledStep(stack, self._weights, dpfp, config.rule == "delta")

    def _read(self, x: Tensor) -> Tensor:
        backbone = self.backbone
        h = (
            x
            if backbone.config.positions == "none"
            else backbone.add_positions(x, self._tokens_seen)
        )
        self._n_read += x.shape[1]
        one = x.shape[1] == 1 and backbone.config.rule != "outer-product"
        if one and self._step is not None:
            # A copy, since it is overwritten.
            h = h.to(self._dtype).clone(memory_format=torch.contiguous_format)
            if not self._step.read(h):
                refuse_non_finite(h)
            return h
        for n, layer in enumerate(backbone.stack()):
            if one:
                h = layer.after_attention(h, self._read_one(n, layer, h))
            else:
                own = FastWeightsLayerMemory(self._weights[n], self._key_sums[n])
                h, after = layer(h, own)
                self._weights[n].copy_(after.weights)
                self._key_sums[n].copy_(after.key_sum)
        h = backbone.final_norm(h)
        refuse_non_finite(h)
        return h

    def _read_one(self, n: int, layer: FastWeightsLayer, h: Tensor) -> Tensor:
        """The attention of layer ``n`` for one token per row: ``[B, 1, D] -> [B, 1, D]``.

        Query and key read the old weights in one product. What the token then writes adds ``(q . k) u``
        to the query's result.
        """
        attention = layer.attention
        config = self.backbone.config
        x = F.linear(layer.before_attention(h), self._projections[n])
        batch = len(h)
        n_heads = config.n_heads
        width = config.head_width
        with torch.autocast(h.device.type, enabled=False):
            x = x.squeeze(1).to(self._dtype)
            inner = n_heads * width
            both = x[:, : 2 * inner].view(batch, 2, n_heads, width).transpose(1, 2)
            both = attention.features(both).flatten(0, 1)
            q = both[:, :1]
            k = both[:, 1:]
            u = x[:, 2 * inner : 3 * inner].reshape(-1, 1, width)
            weights = self._weights[n].flatten(0, 1)
            z = self._key_sums[n].flatten(0, 1)
            divided = config.normalisation == "attention"
            y, old = torch.bmm(both, weights).split(1, 1)
            if config.rule == "delta":
                if divided:
                    old = old / attention.overlap((k * z[:, None]).sum(-1, keepdim=True))
                u = (u - old) * x[:, 3 * inner :].sigmoid().view(-1, 1, 1)
            y = torch.addcmul(y, (q * k).sum(-1, keepdim=True), u)
            weights.baddbmm_(k.mT, u)
            if divided:
                z.add_(k[:, 0])
                y = y / ((q * z[:, None]).sum(-1, keepdim=True) + config.epsilon)
        return attention.output(y.view(batch, 1, inner).to(h.dtype))
