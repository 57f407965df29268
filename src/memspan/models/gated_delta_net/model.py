"""Gated DeltaNet (Yang, Kautz, Hatamizadeh 2024, arXiv 2412.06464): memory and stack.

Every head of values has a matrix that each token first decays, then writes to and reads from
(eq. 10); these matrices, and the last inputs of the convolutions, are the memory. Options:
:class:`memspan.models.GatedDeltaNetConfig`. One layer: ``layer.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from memspan.memory import Memory
from memspan.models.gated_delta_net.config import GatedDeltaNetConfig
from memspan.models.gated_delta_net.layer import (
    GatedDeltaNetLayer,
    GatedDeltaNetLayerMemory,
    row_sizes,
)
from memspan.models.initialisation import initialise
from memspan.models.known import known
from memspan.models.output import BackboneOutput
from memspan.models.packing import STACK, schema_of
from memspan.models.protocol import Backbone
from memspan.models.readers import BackboneReader
from memspan.models.segments import Documents
from memspan.nn import count_after, dropout_layer
from memspan.ops.fast_weights import compiled as delta_rule_loop
from memspan.ops.fast_weights.rules import IMPLEMENTATIONS
from memspan.trees import check_config

PARTS = rf"""{STACK} | layers.\d+.mixer.(convolution | A_log | dt_bias)
    | layers.\d+.mixer.(query|key|value|output_gate|beta|step|norm|output).weight
"""
"""What the reader knows, see :func:`memspan.models.packing.schema_of`."""


@dataclass(frozen=True, repr=False)
class GatedDeltaNetMemory(Memory):
    """The matrices of every layer and head and the last inputs of the convolutions, in float32 or
    better."""

    weights: Tensor
    """``[B, L, H, K, V]``: keys by values, the paper's S transposed."""
    inputs: Tensor
    """Before the convolutions, oldest first: queries, keys and values side by side,
    ``[B, L, W - 1, C]``."""

    def layers(self, dtype: torch.dtype) -> list[GatedDeltaNetLayerMemory]:
        """Each layer's share of the memory, in this type."""
        fields = (self.weights.to(dtype).unbind(1), self.inputs.to(dtype).unbind(1))
        return [GatedDeltaNetLayerMemory(*own) for own in zip(*fields, strict=True)]


@known("config")
class GatedDeltaNet(Backbone[GatedDeltaNetMemory]):
    """The stack over vectors: ``[B, T, D]`` and a memory in, ``[B, T, D]`` and a memory out.

    Results do not depend on where a text is cut into segments. Gradients flow into the memory that is
    passed in: training code calls ``memory.detach()`` between segments.
    """

    memory_type = GatedDeltaNetMemory
    knows_documents = True
    implementations = tuple(IMPLEMENTATIONS)
    config: GatedDeltaNetConfig

    def __init__(self, config: GatedDeltaNetConfig) -> None:
        check_config(self, config, "GatedDeltaNetConfig")
        super().__init__(config)
        self.dropout = dropout_layer(config.dropout)
        self.layers = nn.ModuleList(GatedDeltaNetLayer(config) for _ in range(config.n_layers))
        self.final_norm = nn.LayerNorm(config.d_model)
        kept = [
            (p, p.detach().clone()) for n, p in self.named_parameters() if n.endswith("dt_bias")
        ]
        initialise(self, config.initialisation, config.n_layers)
        with torch.no_grad():
            # No bias of a product: zeros would forget within a few tokens.
            for parameter, value in kept:
                parameter.copy_(value)
        self.schema = schema_of(self, PARTS)

    def stack(self) -> Iterator[GatedDeltaNetLayer]:
        """The layers, first to last, as :class:`GatedDeltaNetLayer`."""
        return iter(self.layers)  # type: ignore[arg-type]

    def row_sizes(self) -> Mapping[str, tuple[int | None, ...]]:
        sizes = row_sizes(self.config).items()
        return {name: (self.config.n_layers, *size) for name, size in sizes}

    def read_piece(
        self,
        x: Tensor,
        memory: GatedDeltaNetMemory,
        implementation: str | None,
        documents: Documents | None = None,
    ) -> BackboneOutput[GatedDeltaNetMemory]:
        """See :meth:`Backbone.read_piece`; ``implementation``: of
        :func:`memspan.ops.fast_weights.rules.delta_rule`; ``reference`` also takes the convolution's.
        """
        dtype = torch.promote_types(x.dtype, torch.float32)
        h = self.dropout(x)
        after = []
        for layer, before in zip(self.stack(), memory.layers(dtype), strict=True):
            h, own = self.through(layer, h, before, implementation, documents)
            after.append(own)
        memory = GatedDeltaNetMemory(
            count_after(memory.tokens_seen, x.shape[1], documents),
            weights=torch.stack([own.weights for own in after], 1),
            inputs=torch.stack([own.inputs for own in after], 1),
        )
        return BackboneOutput(self.final_norm(h), memory, h.new_zeros(()))

    def reader_type(self) -> type[BackboneReader[GatedDeltaNetMemory]]:
        from memspan.models.gated_delta_net.reader import GatedDeltaNetReader

        return GatedDeltaNetReader

    def compiled_loops(self) -> bool:
        """True if the chunks in C can run here."""
        return delta_rule_loop.available(next(self.parameters()))

    def float32_part(self) -> str:
        """All between the products, see :meth:`Backbone.float32_part`."""
        return "matrices are decayed, written and read"
