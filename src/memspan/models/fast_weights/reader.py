"""The reader of Fast Weights, which updates its memory in place."""

from __future__ import annotations

import math
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from memspan.devices import can_look
from memspan.errors import NonFiniteError
from memspan.memory import Memory, Rows, sent
from memspan.models.fast_weights.model import (
    FastWeights,
    FastWeightsLayer,
    FastWeightsMemory,
    listed,
)
from memspan.models.inputs import check_vectors
from memspan.models.one_token import packed_stack
from memspan.models.protocol import PassReader, WatchedReader
from memspan.models.segments import cuts
from memspan.ops.delta_rule import compiled as delta_rule_loop
from memspan.ops.delta_rule.compiled import CompiledStep
from memspan.ops.delta_rule.feature_maps import DPFP


class FastWeightsReader(WatchedReader):
    """Reads a stream without gradients, with constant memory and time per token. A single token takes
    one call to the loop in C where that can run, otherwise a few tensor operations per layer."""

    def __init__(self, backbone: FastWeights, memory: FastWeightsMemory) -> None:
        super().__init__(backbone)
        self.backbone = backbone
        parameter = next(backbone.parameters())
        self._dtype = torch.promote_types(parameter.dtype, torch.float32)
        self._tokens_seen, self._feature_map = memory.tokens_seen, memory.feature_map
        self._rows = Rows.of(memory)
        # Copies, since they are updated in place.
        self._weights = [w.detach().to(self._dtype, copy=True) for w in memory.weights.unbind(1)]
        self._key_sums = [z.detach().to(self._dtype, copy=True) for z in memory.key_sum.unbind(1)]

    @cached_property
    def _projections(self) -> list[Tensor]:
        """Of each layer: not before a single token is read."""
        return [layer.attention.fused_weight() for layer in self.backbone.stack()]

    @cached_property
    def _step(self) -> CompiledStep | None:
        """The loop in C, if it supports these options and can run here."""
        config = self.backbone.config
        supported = (
            config.rule != "outer-product"
            and config.feature_map == "dpfp"
            and config.normalisation != "attention"
            and config.norm != "post"
            and next(self.backbone.parameters()).dtype == self._dtype
        )
        can = supported and delta_rule_loop.available(self._weights[0])
        return self._compiled_step() if can else None

    def _compiled_step(self) -> CompiledStep:
        config = self.backbone.config
        stack = packed_stack(
            delta_rule_loop.SOURCE,
            self.backbone.stack(),
            [{"projections": weight} for weight in self._projections],
            self.backbone.final_norm,
            n_heads=config.n_heads,
            batch=len(self._tokens_seen),
        )
        dpfp = DPFP(config.nu, config.epsilon if config.normalisation == "sum" else None)
        return CompiledStep(stack, self._weights, dpfp, config.rule == "delta")

    @property
    def memory(self) -> FastWeightsMemory:
        """The memory after the last token: a copy, which reading on does not change."""
        return self._memory(slice(None))

    def select(self, rows: Tensor | list[int]) -> FastWeightsMemory:
        """See :meth:`BackboneReader.select`."""
        return self._memory(sent(self._rows.numbers(rows), self._tokens_seen.device))

    def _memory(self, at: Tensor | slice) -> FastWeightsMemory:
        return FastWeightsMemory(
            tokens_seen=self._tokens_seen[at],
            weights=torch.stack([w[at] for w in self._weights], 1),
            key_sum=torch.stack([z[at] for z in self._key_sums], 1),
            feature_map=self._feature_map[at],
        )

    def read(self, x: Tensor, starts: Tensor | None = None) -> Tensor:
        """See :meth:`BackboneReader.read`.

        Raises:
            NonFiniteError: the output is not finite. On a GPU, where checking would wait for the
                device, it is returned as it is.
        """
        width, device = self.backbone.config.d_model, self._tokens_seen.device
        check_vectors(x, width, device, self._rows.count, starts)
        if not x.shape[1]:
            return self.backbone.final_norm(x)
        self.watch.refuse_changes(x.shape[1] > 1)
        if starts is None:
            return self._read(x)
        parts, starts = [], starts.cpu()
        for start, end in cuts(starts):
            self.reset(starts[:, start])
            parts.append(self._read(x[:, start:end]))
        return torch.cat(parts, 1)

    @torch.no_grad()
    def reset(self, mask: Tensor | list[bool]) -> None:
        """See :meth:`BackboneReader.reset`."""
        self.watch.refuse_changes(whole=False)
        at = sent(self._rows.mask(mask).nonzero().flatten(), self._tokens_seen.device)
        self._tokens_seen = self._tokens_seen.index_fill(0, at, 0)
        self._feature_map = self._feature_map.index_fill(0, at, 0)
        for tensor in (*self._weights, *self._key_sums):
            tensor.index_fill_(0, at, 0)

    @torch.no_grad()
    def replace(self, rows: Tensor | list[int], memory: Memory) -> None:
        """See :meth:`BackboneReader.replace`.

        Raises:
            MemspanError: also where another feature map wrote the memory. Where looking would wait for
                the device, such rows come out as NaN.
        """
        self.watch.refuse_changes(whole=False)
        numbers, given = self._rows.replacement(rows, memory)
        device = self._tokens_seen.device
        given, at = given.map(lambda t: sent(t, device)), sent(numbers, device)
        if can_look(given.feature_map):
            self.backbone.check_feature_map(given)
        foreign = self.backbone.foreign(given)[:, None, None, None]
        self._tokens_seen = self._tokens_seen.index_copy(0, at, given.tokens_seen)
        self._feature_map = self._feature_map.index_copy(0, at, given.feature_map)
        for n, (weights, key_sum) in enumerate(
            zip(given.weights.unbind(1), given.key_sum.unbind(1), strict=True)
        ):
            self._weights[n].index_copy_(
                0, at, weights.to(self._dtype).masked_fill(foreign, math.nan)
            )
            self._key_sums[n].index_copy_(0, at, key_sum.to(self._dtype))

    def _read(self, x: Tensor) -> Tensor:
        backbone = self.backbone
        h = backbone.add_positions(x, self._tokens_seen)
        self._tokens_seen = self._tokens_seen + x.shape[1]
        self._feature_map = backbone.feature_id.repeat(len(x))
        one = x.shape[1] == 1 and backbone.config.rule != "outer-product"
        if one and self._step is not None:
            # A copy, since it is overwritten.
            h = h.to(self._dtype, copy=True, memory_format=torch.contiguous_format)
            if not self._step.read(h):
                refuse_non_finite(h)
            return h
        for n, layer in enumerate(backbone.stack()):
            if one:
                h = layer.after_attention(h, self._read_one(n, layer, h))
            else:
                h, weights, key_sum = layer(h, self._weights[n], self._key_sums[n])
                self._weights[n].copy_(weights)
                self._key_sums[n].copy_(key_sum)
        h = backbone.final_norm(h)
        refuse_non_finite(h)
        return h

    def _read_one(self, n: int, layer: FastWeightsLayer, h: Tensor) -> Tensor:
        """The attention of layer ``n`` for one token per row: ``[B, 1, D] -> [B, 1, D]``.

        Query and key read the old weights in one product. What the token then writes adds ``(q . k) u``
        to the query's result.
        """
        attention, config = layer.attention, self.backbone.config
        x = F.linear(layer.before_attention(h), self._projections[n])
        batch, n_heads, width = len(h), config.n_heads, config.head_width
        with torch.autocast(h.device.type, enabled=False):
            x = x.view(batch, -1).to(self._dtype)
            inner = n_heads * width
            both = x[:, : 2 * inner].view(batch, 2, n_heads, width).transpose(1, 2)
            both = attention.features(both).reshape(batch * n_heads, 2, -1)
            q, k = both[:, :1], both[:, 1:]
            u = x[:, 2 * inner : 3 * inner].reshape(-1, 1, width)
            weights, z = self._weights[n].flatten(0, 1), self._key_sums[n].flatten(0, 1)
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
        return attention.output(y.view(batch, 1, -1).to(h.dtype))


class FastWeightsPassReader(PassReader[FastWeightsMemory]):
    """Of a backbone whose modules are not those that it was made with; it refuses what is not finite,
    too."""

    def read(self, x: Tensor, starts: Tensor | None = None) -> Tensor:
        """See :meth:`FastWeightsReader.read`."""
        output = super().read(x, starts)
        refuse_non_finite(output)
        return output


def refuse_non_finite(output: Tensor) -> None:
    """Raise :class:`NonFiniteError` where ``output [B, T, D]`` is not finite: one such key or value has
    spoilt its row's fast weights, and with them every later output."""
    if not can_look(output):
        return
    if math.isfinite(output.sum(dtype=torch.float32).item()):
        return
    rows = ~output.isfinite().flatten(1).all(1)
    if rows.any():
        raise NonFiniteError(
            f"keys or values of rows {listed(rows)} are not finite, nor are their fast weights: "
            "check the input, or read on from an earlier memory; in training, lower the learning rate, "
            "or use normalisation sum, without which the delta rule may diverge"
        )
