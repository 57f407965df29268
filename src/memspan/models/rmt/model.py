"""Recurrent Memory Transformer (Bulatov et al. 2022, arXiv 2207.06881): memory and wrapper.

A text is read in blocks of ``S`` tokens, the paper's segments. With memory tokens ``m`` before and
after a block ``x`` (section 3.2)::

    [_ ; y ; m'] = backbone([m ; x ; m])

``y`` is the output, and ``m'`` is the next block's ``m``; the first block's is learned. The backbone
begins each block with an empty memory of its own, so it may be any that is causal. With associative
memory (``layer.py``) nothing stands before a block, and the learned ``m`` after each.

Where a text is cut changes nothing. A memory keeps the inputs of the block that is not full, and they
are read again, with what comes, until it has ``S``: then ``m`` is written, and not before. A token that
is read alone thus takes as long as its block so far. Options: :class:`memspan.models.RMTConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from memspan.memory import Memory
from memspan.models.blocks import columns_of, from_block_start
from memspan.models.initialisation import FACTORS, initialise
from memspan.models.output import BackboneOutput
from memspan.models.rmt.config import RMTConfig
from memspan.models.rmt.layer import NU, AssociativeMemory
from memspan.models.wrapper import Wrapper
from memspan.nn import sinusoids, where_in_use
from memspan.trees import check_config


@dataclass(frozen=True, repr=False)
class RMTMemory(Memory):
    """Memory of all full blocks, and the inputs of the one that is not, in float32 or better."""

    tokens: Tensor
    """``m' [B, M, D]``, zero before the first full block; with associative memory ``M`` is 0."""
    inputs: Tensor
    """``[B, S - 1, D]``, newest right-most: the last ``tokens_seen % S``; the others are zero."""
    weights: Tensor
    """``A [B, L, F, D]`` with associative memory; else ``L`` is 0."""
    key_sum: Tensor
    """``z [B, L, F]`` with associative memory; else ``L`` is 0."""


class RMT(Wrapper[RMTMemory]):
    """Memory tokens around a stack over vectors, see :class:`memspan.models.Backbone`.

    Results do not depend on where a text is cut into segments. Gradients flow through all blocks of a
    segment and into the memory that is passed in: training code calls ``memory.detach()`` where
    backpropagation through time is to end.

    Differs from the paper: no backbone carries anything of its own from block to block, not even
    Transformer-XL.
    """

    memory_type = RMTMemory
    config: RMTConfig

    def __init__(self, config: RMTConfig) -> None:
        check_config(self, config, "RMTConfig")
        super().__init__(config)
        self.memory_tokens = nn.Parameter(torch.empty(config.memory_tokens, config.d_model))
        self.associative = nn.ModuleList(
            AssociativeMemory(config.d_model, config.d_memory)
            for _ in range(config.n_layers if config.associative else 0)
        )
        initialise(self, config.initialisation, config.n_layers)
        for memory in self.associative:
            nn.init.zeros_(memory.get_parameter("value.weight"))
        # As tokens' embeddings, which a language model scales.
        nn.init.normal_(self.memory_tokens, std=FACTORS["embedding"])
        self.wrap(config.wrapped().build())

    def row_sizes(self) -> Mapping[str, tuple[int | None, ...]]:
        config = self.config
        layers = len(self.associative)
        features = 2 * NU * config.d_memory
        return {
            "tokens": (0 if layers else config.memory_tokens, config.d_model),
            "inputs": (config.block_length - 1, config.d_model),
            "weights": (layers, features, config.d_model),
            "key_sum": (layers, features),
        }

    def read_piece(
        self, x: Tensor, memory: RMTMemory, implementation: str | None
    ) -> BackboneOutput[RMTMemory]:
        size = self.config.block_length
        n_tokens = x.shape[1]
        memory = memory.to(dtype=torch.promote_types(x.dtype, torch.float32))
        length = memory.tokens_seen % size
        blocks_before = memory.tokens_seen.div(size, rounding_mode="floor")
        both = torch.cat([memory.inputs.to(x.dtype), x], 1)
        # Columns after a row's last are seen by none before.
        rows = from_block_start(both, length, size)
        hidden = []
        for n, block in enumerate(rows.split(size, 1)):
            h, after = self.read_block(block, memory, blocks_before + n, implementation)
            hidden.append(h)
            memory = where(length + n_tokens >= (n + 1) * size, after, memory)
        column = torch.arange(n_tokens, device=x.device) + length[:, None]
        seen = memory.tokens_seen + n_tokens
        memory = replace(
            memory,
            tokens_seen=seen,
            inputs=where_in_use(both[:, n_tokens:].to(memory.inputs.dtype), seen % size),
        )
        hidden_all = columns_of(torch.cat(hidden, 1), column)
        return BackboneOutput(hidden_all, memory, hidden_all.new_zeros(()))

    def read_block(
        self, block: Tensor, memory: RMTMemory, number: Tensor, implementation: str | None
    ) -> tuple[Tensor, RMTMemory]:
        """Read a block ``[B, T, D]``, each row's ``number [B]``-th: its output, and the memory after it
        if it is full."""
        n_tokens = block.shape[1]
        full = n_tokens == self.config.block_length
        tokens = self.memory_tokens.to(block.dtype).expand(block.shape[0], -1, -1)
        if self.associative:
            h = torch.cat([block, tokens], 1) if full else block
            h, after = self.read_associative(h, memory, number, implementation == "reference")
            return h[:, :n_tokens], after if full else memory
        tokens = tokens.where((number == 0)[:, None, None], memory.tokens.to(block.dtype))
        parts = [tokens, block, tokens] if full else [tokens, block]
        # Past the checks of what a user gives.
        read = nn.Module.__call__(self.backbone, torch.cat(parts, 1), implementation=implementation)
        h = read.hidden
        _, output, after_block = h.tensor_split((tokens.shape[1], tokens.shape[1] + n_tokens), 1)
        if not full:
            return output, memory
        return output, replace(memory, tokens=after_block.to(memory.tokens.dtype).contiguous())

    def read_associative(
        self, x: Tensor, memory: RMTMemory, number: Tensor, plain: bool
    ) -> tuple[Tensor, RMTMemory]:
        """Read ``x [B, T, D]``, a block and the memory tokens, through the transformer's layers: each
        first adds what it reads from its associative memory, and last writes the memory tokens."""
        transformer: Any = self.backbone
        position = torch.arange(x.shape[1], device=x.device)
        codes = sinusoids(position, self.config.d_model // self.config.n_heads, x.dtype)
        mask = (position <= position[:, None])[None]
        memories: Any = zip(
            self.associative, memory.weights.unbind(1), memory.key_sum.unbind(1), strict=True
        )
        h = transformer.dropout(x)
        written = []
        for layer, (own, *before) in zip(transformer.layers, memories, strict=True):
            h = h + own.read(h, *before, number == 0, plain)
            h = self.through(layer, h, mask, codes, plain)
            tokens = h[:, -self.config.memory_tokens :]
            written.append(own.write(tokens, *before, number == 0, plain))
        weights, key_sum = (torch.stack(each, 1) for each in zip(*written, strict=True))
        return transformer.final_norm(h), replace(memory, weights=weights, key_sum=key_sum)

    def float32_part(self) -> str | None:
        if self.associative:
            return "associative memory is written and read"
        return super().float32_part()


def where(rows: Tensor, new: RMTMemory, old: RMTMemory) -> RMTMemory:
    """The memory ``new`` in the rows that ``rows`` (bool ``[B]``) marks, ``old`` in the others."""
    if new is old:
        return old
    before = old.tensors()
    fields = {
        name: t.where(rows.view(-1, *[1] * (t.dim() - 1)), before[name])
        for name, t in new.tensors().items()
    }
    return RMTMemory(**fields)
