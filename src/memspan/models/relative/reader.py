"""The reader of Transformer-XL, to which the Compressive Transformer's adds the compressed slots."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memspan.models.defaults import M
from memspan.models.in_place import BufferedReader
from memspan.models.one_token import StepsInC, packed_stack
from memspan.models.relative.attention import RelativeAttention, RelativeLayer, Span
from memspan.models.relative.backbone import RelativeBackbone
from memspan.models.segments import Documents, documents_of
from memspan.nn import count_after, where_in_use
from memspan.ops.relative import Positions, attend_one, relative_attention
from memspan.ops.relative_step import compiled as relative_step
from memspan.ops.relative_step.compiled import CompiledStep
from memspan.trees import to_device


class RelativeReader(BufferedReader[M], StepsInC[CompiledStep]):
    """Reads a stream without gradients; keys and values of memory are projected once and cached.

    Hidden states, keys and values are appended to buffers ``[memory | room]``, in which each row's
    slots end at the same column. When a buffer is full its last slots move to a new one, so the cost
    per token is constant. A single token takes one call to the step in C where that can run
    (``ops/relative_step/README.md``).
    """

    counts_attention = False
    """True if :meth:`_advance` needs the attention that each slot received."""

    @torch.no_grad()
    def __init__(self, backbone: RelativeBackbone[M], memory: M, span: Span) -> None:
        super().__init__(backbone, memory)
        hidden = self._slots(memory)
        self.backbone = backbone
        self.n_slots = hidden.shape[2]
        self._span = span
        self.slots = memory.slots()["length"]
        self._longest = backbone.longest_piece(span, self.n_slots)
        self._layers = list(backbone.stack())
        # Queries, keys and values are one product, with u as the queries' bias.
        self._projections = [_fused_projection(layer.attention) for layer in self._layers]
        # For all layers and the distances covered so far: R [L, H, S, K] and (v - u).R + S [L, H, S],
        # nearest first, and both again farthest first, which is the order of the keys.
        self._nearest_first: tuple[Tensor, Tensor]
        self._farthest_first: tuple[Tensor, Tensor]
        self._covered = 0
        self._cover(self.n_slots + 1)
        # The buffers: [L, B, C, D] and [L, B, H, C, K], with C columns. Copies: they are written to.
        dtype = backbone.one_weight.dtype
        self._hidden = hidden.detach().to(dtype, copy=True).transpose(0, 1)
        self._keys, self._values = self._keys_and_values(self._hidden)
        # One past the newest column.
        self._end = self.n_slots
        self._count(**memory.counts())

    @staticmethod
    def _slots(memory: Any) -> Tensor:
        """All slots of ``memory`` as ``[B, L, N, D]``, a row's valid ones right-most."""
        hidden: Tensor = memory.hidden
        return hidden

    def _memory(self, rows: Tensor | slice, at: Tensor | slice) -> M:
        counts = {
            name: to_device(count[rows], self._device) for name, count in self._counts.items()
        }
        fields = self._fields(at, counts) | counts
        return self.backbone.memory_type(tokens_seen=self._tokens_seen[at], **fields)

    def _fields(self, at: Tensor | slice, counts: dict[str, Tensor]) -> dict[str, Tensor]:
        """The slots of the rows ``at`` as the fields of a memory; ``counts``: how many are in use."""
        recent = slice(self._end - self.slots, self._end)
        hidden = torch.stack([h[at, recent] for h in self._hidden], 1)
        return {"hidden": where_in_use(hidden, counts["length"])}

    def _read_vectors(self, x: Tensor, starts: Tensor | None) -> Tensor:
        n_tokens = x.shape[1]
        longest = self._longest
        self.watch.refuse_changes()
        if longest is None or n_tokens <= longest:
            return self._read(x, starts)
        pieces = [None] * -(-n_tokens // longest) if starts is None else starts.split(longest, 1)
        return torch.cat(
            [self._read(*each) for each in zip(x.split(longest, 1), pieces, strict=True)], 1
        )

    def _read(self, x: Tensor, starts: Tensor | None = None) -> Tensor:
        n_new = x.shape[1]
        span = self._span
        _, documents = documents_of(x, starts)
        self._make_room(n_new)
        self._cover(self.n_slots + n_new)
        if n_new == 1 and documents is None and (step := self._step_for(x, self._hidden.dtype)):
            return self._read_one(step, x)
        # Only slots that some row uses are attended. Rows that use equally many need no mask over them.
        most = self._most
        mask = None
        if n_new > 1 or not self._equal or span.attention == "fixed" or documents is not None:
            used = to_device(self._used, x.device)
            limits = span.visible(used, n_new, most, self.n_slots, documents)
            mask = limits.mask(most + n_new)
        new = slice(self._end, self._end + n_new)
        attended = slice(self._end - most, self._end + n_new)
        received: list[Tensor] = []
        h = x
        for n, layer in enumerate(self._layers):
            self._hidden[n][:, new] = h
            projected = F.linear(_normalised(layer, h), *self._projections[n])
            q, k, v = layer.attention.heads(projected).chunk(3, 1)
            self._keys[n][:, :, new] = k
            self._values[n][:, :, new] = v
            if self.counts_attention:
                received.append(h.new_zeros(len(h), most + n_new))
            k = self._keys[n][:, :, attended]
            v = self._values[n][:, :, attended]
            counter = received[n] if received else None
            h = layer.residual(h, self._attend(n, q, k, v, mask, counter))
        self._advance(n_new, documents, received)
        return self.backbone.final_norm(h)

    def _attend(
        self, n: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, received: Tensor | None
    ) -> Tensor:
        """Layer ``n``'s attention sub-layer, ``[B, T, D]``, over distances that are covered.

        ``mask``: bool ``[B, T, S]`` (None: everything is attended); ``received [B, S]``: the attention
        that each key receives is added to it.
        """
        n_keys = k.shape[2]
        if q.shape[2] != 1 or received is not None:
            keys, scores = (t[n, :, :n_keys] for t in self._nearest_first)
            positions = Positions(keys, scores)
            attended = relative_attention(q, k, v, positions, mask=mask, received=received)
        else:
            keys, scores = (t[n, :, self._covered - n_keys :] for t in self._farthest_first)
            one = None if mask is None else mask[:, 0]
            attended = attend_one(q.squeeze(2), k, v, keys, scores, one).unsqueeze(2)
        return self._layers[n].attention.output(attended.transpose(1, 2).flatten(2))

    def _cover(self, n_distances: int) -> None:
        """Project the distances ``0 .. n_distances - 1``, unless they are already."""
        if n_distances <= self._covered:
            return
        backbone = self.backbone
        by_layer = []
        # Once for all tokens, so in full precision, also under autocast.
        with torch.autocast(self._device.type, enabled=False):
            codes = self._span.codes(
                backbone.config, n_distances, self.n_slots, backbone.one_weight
            )
            for layer in self._layers:
                keys, scores = layer.attention.distances(codes)
                u = layer.attention.content_bias
                v = layer.attention.position_bias
                # The projected query contains u: only v - u is left of v.
                shift = -u if v is None else v - u
                by_distance = (keys @ shift[:, :, None]).squeeze(-1)
                by_layer.append((keys, by_distance if scores is None else by_distance + scores))
        keys, scores = (torch.stack(each) for each in zip(*by_layer, strict=True))
        self._nearest_first = (keys, scores)
        self._covered = n_distances
        self._farthest_first = keys.flip(2), scores.flip(2)

    def _compiles(self, bf16_weights: bool) -> bool:
        pre_norm = self.backbone.config.normalisation == "pre"
        return pre_norm and relative_step.available(self._hidden, bf16_weights)

    def _compiled_step(self, bf16_weights: bool) -> CompiledStep:
        backbone = self.backbone
        projections = [
            {"projections": weight, "projections_bias": bias} | _gates(layer)
            for layer, (weight, bias) in zip(self._layers, self._projections, strict=True)
        ]
        return CompiledStep(
            packed_stack(
                relative_step.SOURCE,
                self._layers,
                projections,
                backbone.final_norm,
                n_heads=backbone.config.n_heads,
                batch=self._rows.count,
                bf16_weights=bf16_weights,
            )
        )

    def _read_one(self, step: CompiledStep, x: Tensor) -> Tensor:
        most = self._most
        used = self._used
        received = None
        if self._span.attention == "fixed":
            # The token itself is one of as many positions as there are slots.
            most = min(most, self.n_slots - 1)
            used = used.clamp(max=self.n_slots - 1)
        if self.counts_attention:
            received = x.new_zeros(len(self._hidden), len(x), most + 1)
        # A copy, since it is overwritten.
        h = x.detach().clone(memory_format=torch.contiguous_format)
        step.read(h, self._buffers(), self._end, used, most, self._farthest_first, received)
        self._advance(1, None, [] if received is None else list(received))
        return h

    def _advance(self, n_new: int, documents: Documents | None, received: list[Tensor]) -> None:
        """Go on behind ``n_new`` columns that were written, and call :meth:`_count` with the slots then
        in use.

        ``received``: with ``counts_attention``, the attention that each attended column received, per
        layer ``[B, N + T]``.
        """
        counts, added = self._step_over(n_new, documents)
        if documents is not None or not self._equal or self._most < self.n_slots:
            self._count(length=(counts["length"] + added).clamp(max=self.n_slots))

    def _step_over(
        self, n_new: int, documents: Documents | None
    ) -> tuple[dict[str, Tensor], int | Tensor]:
        """Count ``n_new`` tokens. Returns what is left of the slots that were in use, and how many are
        new, ``[B]`` with documents: of a row with several, those of the last alone count."""
        self._end += n_new
        if documents is None:
            self._n_read += n_new
            return self._counts, n_new
        self._tokens_seen = count_after(self._tokens_seen, n_new, documents)
        # A device is waited for once.
        kept, added = torch.stack([(~documents.fresh).long(), documents.n_last]).cpu()
        return {name: kept * count for name, count in self._counts.items()}, added

    def _empty(self, rows: Tensor, at: Tensor) -> None:
        self._zero(at)
        self._tokens_seen = self._tokens_seen.index_fill(0, at, 0)
        self._count(**{name: count.index_fill(0, rows, 0) for name, count in self._counts.items()})

    def _put(self, rows: Tensor, at: Tensor, memory: M) -> None:
        """Keys and values are computed for these rows alone."""
        seen = to_device(memory.tokens_seen, self._device)
        hidden = to_device(self._slots(memory), self._device, self._hidden.dtype).transpose(0, 1)
        computed = hidden, *self._keys_and_values(hidden)
        self._zero(at)
        slots = slice(self._end - self.n_slots, self._end)
        for buffer, new in zip(self._buffers(), computed, strict=True):
            buffer[..., slots, :].index_copy_(1, at, new.to(buffer.dtype))
        self._tokens_seen = self._tokens_seen.index_copy(0, at, seen)
        self._count(
            **{
                name: count.index_copy(0, rows, getattr(memory, name).cpu())
                for name, count in self._counts.items()
            }
        )

    def _zero(self, at: Tensor) -> None:
        """Zero the buffers of the rows ``at``, on the device."""
        # Masked values are still multiplied by zero, which leaves NaN where one is not finite.
        for buffer in self._buffers():
            buffer[..., : self._end, :].index_fill_(1, at, 0)

    def _keys_and_values(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all layers' slots ``[L, B, N, D]``: ``[L, B, H, N, K]`` each."""
        projected = []
        for layer, slots in zip(self._layers, hidden, strict=True):
            attention = layer.attention
            context = _normalised(layer, slots.to(self.backbone.one_weight.dtype))
            parts = attention.key(context), attention.value(context)
            projected.append([attention.heads(part) for part in parts])
        keys, values = (torch.stack(each) for each in zip(*projected, strict=True))
        if hidden.device.type == "cpu":
            # The step in C reads all buffers as one type; under autocast these are of another.
            keys = keys.to(hidden.dtype)
            values = values.to(hidden.dtype)
        return keys, values

    def _buffers(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._hidden, self._keys, self._values

    def _count(self, **counts: Tensor) -> None:
        """Set the fields of memory that count valid slots, int64 ``[B]`` each: on the CPU, since shapes
        depend on them."""
        first, *others = counts.values()
        self._counts = counts
        self._used = sum(others, first)
        used: list[int] = self._used.tolist()
        self._most = max(used, default=0)
        self._equal = min(used, default=0) == self._most

    def _make_room(self, n_new: int) -> None:
        if self._end + n_new <= self._hidden.shape[2]:
            return
        room = self.n_slots + n_new + max(self.n_slots, 64)

        def moved(buffer: Tensor) -> Tensor:
            fresh = buffer.new_empty(*buffer.shape[:-2], room, buffer.shape[-1])
            recent = buffer[..., self._end - self.n_slots : self._end, :]
            fresh[..., : self.n_slots, :] = recent
            return fresh

        self._hidden, self._keys, self._values = map(moved, self._buffers())
        self._end = self.n_slots


def _gates(layer: RelativeLayer) -> dict[str, Tensor]:
    """The weights of the layer's gates, by the names that the step in C has for them."""
    return {
        name.removesuffix(".weight").replace(".", "_"): parameter
        for name, parameter in layer.named_parameters()
        if "_gate." in name
    }


def _normalised(layer: RelativeLayer, context: Tensor) -> Tensor:
    """The input of the products that make queries, keys and values: with pre-norm, normalised."""
    norm = layer.input_norm
    return context if norm is None else norm(context)  # type: ignore[no-any-return]


def _fused_projection(attention: RelativeAttention) -> tuple[Tensor, Tensor]:
    """Query, key and value weights as one, with ``u`` as the query's bias."""
    u = attention.content_bias.flatten()
    products = attention.query, attention.key, attention.value
    biases: list[Tensor] = [torch.zeros_like(u) if p.bias is None else p.bias for p in products]
    biases[0] = biases[0] + u
    return torch.cat([p.weight for p in products]), torch.cat(biases)
