"""Infini-attention (Munkhdalai et al. 2024, arXiv 2404.07143): memory and stack.

One layer, and how it counts blocks: ``layer.py``. Options: :class:`memspan.models.InfiniConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from memspan.memory import Memory
from memspan.models.infini.config import InfiniConfig
from memspan.models.infini.layer import IMPLEMENTATIONS, InfiniLayer, InfiniLayerMemory, row_sizes
from memspan.models.initialisation import initialise
from memspan.models.output import BackboneOutput
from memspan.models.protocol import Backbone
from memspan.nn import dropout_layer
from memspan.trees import check_config


@dataclass(frozen=True, repr=False)
class InfiniMemory(Memory):
    """The matrices of every layer and head, and keys and values of the block that is not full, in
    float32 or better."""

    weights: Tensor
    """``M [B, L, H, K, K]``: keys by values."""
    key_sum: Tensor
    """``z [B, L, H, K]``."""
    keys: Tensor
    """``[B, L, H, S - 1, K]``, newest right-most; empty slots are zero."""
    values: Tensor
    """``[B, L, H, S - 1, K]``."""
    length: Tensor
    """Tokens of the block so far, int64 ``[B]``: slots in use."""

    def slots(self) -> dict[str, int]:
        return {"length": self.keys.shape[3]}

    def layers(self, dtype: torch.dtype) -> list[InfiniLayerMemory]:
        """Each layer's share of the memory, in this type."""
        fields = [self.weights, self.key_sum, self.keys, self.values]
        shares = [t.to(dtype).unbind(1) for t in fields]
        shares.append((self.length,) * len(shares[0]))
        return [InfiniLayerMemory(*own) for own in zip(*shares, strict=True)]


class Infini(Backbone[InfiniMemory]):
    """The stack over vectors: ``[B, T, D]`` and a memory in, ``[B, T, D]`` and a memory out.

    Results do not depend on where a text is cut into segments. Gradients flow into the memory that is
    passed in: training code calls ``memory.detach()`` between segments, whose blocks are thus
    backpropagated through together.
    """

    memory_type = InfiniMemory
    implementations = IMPLEMENTATIONS
    config: InfiniConfig

    def __init__(self, config: InfiniConfig) -> None:
        check_config(self, config, "InfiniConfig")
        super().__init__(config)
        self.dropout = dropout_layer(config.dropout)
        self.layers = nn.ModuleList(InfiniLayer(config) for _ in range(config.n_layers))
        self.final_norm = nn.LayerNorm(config.d_model)
        initialise(self, config.initialisation, config.n_layers)

    def row_sizes(self) -> Mapping[str, tuple[int | None, ...]]:
        """See :meth:`Backbone.row_sizes`: ``length`` has a number per row."""
        layers = self.config.n_layers
        sizes = row_sizes(self.config).items()
        return {name: (layers, *size) if size else size for name, size in sizes}

    def read_piece(
        self, x: Tensor, memory: InfiniMemory, implementation: str | None
    ) -> BackboneOutput[InfiniMemory]:
        h = self.dropout(x)
        after = []
        for layer, before in zip(
            self.layers, memory.layers(torch.promote_types(x.dtype, torch.float32)), strict=True
        ):
            h, own = self.through(layer, h, before, implementation)
            after.append(own)
        memory = InfiniMemory(
            tokens_seen=memory.tokens_seen + x.shape[1],
            weights=torch.stack([own.weights for own in after], 1),
            key_sum=torch.stack([own.key_sum for own in after], 1),
            keys=torch.stack([own.keys for own in after], 1),
            values=torch.stack([own.values for own in after], 1),
            length=after[-1].length,
        )
        return BackboneOutput(self.final_norm(h), memory, h.new_zeros(()))

    def float32_part(self) -> str:
        """The memory, see :meth:`Backbone.float32_part`."""
        return "blocks are written to memory and read"
