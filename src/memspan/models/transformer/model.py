"""Transformer (Vaswani et al. 2017), pre-norm, with rotary positions (Su et al. 2021).

The baseline without memory: a token sees the earlier ones of its own segment and no others, or with a
sliding window those that are read again before it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memspan.files.tensors import read_header
from memspan.memory import Memory
from memspan.models.initialisation import initialise
from memspan.models.inputs import check_memory
from memspan.models.output import BackboneOutput
from memspan.models.protocol import Backbone
from memspan.models.readers import BackboneReader
from memspan.models.segments import Padding, documents_of
from memspan.models.sizes import refuse_oversized
from memspan.models.transformer.config import TransformerConfig
from memspan.models.transformer.layer import TransformerLayer
from memspan.nn import (
    count_after,
    dropout_layer,
    in_use,
    newest,
    sinusoids,
    where_in_use,
)
from memspan.ops.implementations import refuse_unknown_implementation
from memspan.trees import check_config, zeros_for


@dataclass(frozen=True, repr=False)
class TransformerWindow(Memory):
    """The last inputs, to be read again: nothing that layers computed from them is kept. A window of
    ``W`` tokens has ``W - 1`` slots."""

    inputs: Tensor
    """``[B, W - 1, D]``, newest right-most, zero where nothing was read."""
    length: Tensor
    """Slots in use, int64 ``[B]``."""

    def slots(self) -> dict[str, int]:
        return {"length": self.inputs.shape[1]}

    def of_slots(self, count: int) -> TransformerWindow:
        """The newest ``count``, or as many more that are empty."""
        inputs = F.pad(self.inputs, (0, 0, count - self.inputs.shape[1], 0))
        return replace(self, inputs=inputs, length=self.length.clamp(max=count))


class Transformer(Backbone[Memory]):
    """The stack over vectors, see :class:`memspan.models.Backbone`. Reading depends on the cuts.

    On from a :class:`TransformerWindow` of ``W`` tokens, a segment of ``T`` is read together with the
    ``W - T`` tokens before it: every layer anew, so that none sees further, as in training.
    """

    memory_type = Memory
    implementations = ("reference", "sdpa")
    config: TransformerConfig

    def __init__(self, config: TransformerConfig) -> None:
        check_config(self, config, "TransformerConfig")
        super().__init__(config)
        self.dropout = dropout_layer(config.dropout)
        self.layers = nn.ModuleList(TransformerLayer(config) for _ in range(config.n_layers))
        self.final_norm = nn.LayerNorm(config.d_model)
        initialise(self, config.initialisation, config.n_layers)

    def cut_invariant(self) -> bool:
        return False

    def own_memory(self, memory: Memory | None, rows: int) -> Memory:
        if not isinstance(memory, TransformerWindow):
            return super().own_memory(memory, rows)
        sizes = {"inputs": (memory.inputs.shape[1], self.config.d_model)}
        check_memory(memory, TransformerWindow, sizes, self.device)
        return memory

    def load_memory(self, path: Path | IO[bytes], fingerprint: str, like: Memory) -> Memory:
        if read_header(path).get("kind") != TransformerWindow.__name__:
            return super().load_memory(path, fingerprint, like)
        memory = TransformerWindow.load(path, fingerprint).to(self.device)
        return self.own_memory(memory, like.batch_size)

    def reader(  # type: ignore[override]
        self,
        memory: Memory | None,
        batch_size: int,
        window: int | None = None,
        *,
        cuda_graph: bool = False,
    ) -> BackboneReader[Memory]:
        """See :meth:`Backbone.reader`; ``window``: see :class:`WindowOptions`."""
        memory = self.own_memory(memory, batch_size)
        if window is not None:
            refuse_oversized(
                f"a window of {window:,} tokens",
                batch_size * window * self.config.d_model * self.final_norm.weight.itemsize,
                self.device,
                "lower --window",
            )
            if not isinstance(memory, TransformerWindow):
                seen = memory.tokens_seen
                nothing = zeros_for(self.final_norm.weight, len(seen), 0, self.config.d_model)
                memory = TransformerWindow(seen, nothing, torch.zeros_like(seen))
            memory = memory.of_slots(window - 1)
        return super().reader(memory, batch_size, cuda_graph=cuda_graph)

    def longest_segment(self, memory: Memory, window: int | None = None) -> int | None:  # type: ignore[override]
        """Half the window, so that every token sees the other half; a longer stride is allowed."""
        return None if window is None else max(window // 2, 1)

    def context(self, segment_length: int, window: int = 0) -> tuple[int, int]:  # type: ignore[override]
        return max(window - segment_length, 0), max(window, segment_length) - 1

    def forward(
        self,
        x: Tensor,
        memory: Memory | None = None,
        *,
        starts: Tensor | None = None,
        lengths: Tensor | None = None,
        padding: Padding = "right",
        implementation: str | None = None,
    ) -> BackboneOutput[Memory]:
        """Read a segment; ``implementation``: ``reference`` or ``sdpa``, PyTorch's fused attention."""
        refuse_unknown_implementation(implementation, self.implementations)
        memory = self.initial_memory(x.shape[0]) if memory is None else memory
        x, documents = documents_of(x, starts, lengths, padding)
        after: Memory = Memory(count_after(memory.tokens_seen, x.shape[1], documents))
        number = None if documents is None else documents.number
        again = 0
        if isinstance(memory, TransformerWindow):
            n_slots = memory.inputs.shape[1]
            again = max(n_slots + 1 - x.shape[1], 0)
            if x.is_cpu and not torch.compiler.is_compiling() and len(x):
                # Slots that no row uses are not worth reading; to look would wait for another device.
                again = min(again, int(memory.length.max()))
            length = count_after(memory.length, x.shape[1], documents).clamp(max=n_slots)
            inputs = newest(memory.inputs, x.to(memory.inputs.dtype), documents)
            inputs = where_in_use(inputs, length)
            after = TransformerWindow(after.tokens_seen, inputs, length)
            if again:
                # Document -1: empty slots attend to one another, so that no softmax row is empty.
                old = in_use(again, memory.length.clamp(max=again)).long() - 1
                new = old.new_zeros(x.shape[:2]) if number is None else number
                number = torch.cat([old, new], 1)
            x = torch.cat([memory.inputs[:, n_slots - again :].to(x.dtype), x], 1)
        position = torch.arange(x.shape[1], device=x.device)
        codes = sinusoids(position, self.config.d_model // self.config.n_heads, x.dtype)
        mask = (position <= position[:, None])[None]
        if number is not None:
            mask = mask & (number[:, :, None] == number[:, None])
        h = self.dropout(x)
        for layer in self.layers:
            h = self.through(layer, h, mask, codes, implementation == "reference")
        h = self.final_norm(h[:, again:])
        h = h if documents is None else documents.put_back(h)
        return BackboneOutput(h, after, h.new_zeros(()))
