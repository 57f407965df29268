"""A stack of layers with a matrix per head, and its memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from memspan.memory import Memory
from memspan.models.initialisation import initialise
from memspan.models.matrix.mixer import MatrixLayer, MatrixLayerMemory
from memspan.models.matrix.options import MatrixConfig
from memspan.models.output import BackboneOutput
from memspan.models.packing import STACK, schema_of
from memspan.models.protocol import Backbone
from memspan.models.segments import Documents
from memspan.nn import count_after, dropout_layer
from memspan.ops.delta_rules import compiled as delta_rules
from memspan.trees import check_config


@dataclass(frozen=True, repr=False)
class MatrixMemory(Memory):
    """The matrices of every layer and head and the last inputs of the layers, in float32 or better."""

    weights: Tensor
    """``[B, L, H, K, V]``: keys by values."""
    inputs: Tensor
    """Before the convolutions or token shifts, oldest first, ``[B, L, W - 1, C]``."""

    def layers(self, dtype: torch.dtype) -> list[MatrixLayerMemory]:
        """Each layer's share of the memory, in this type."""
        fields = (self.weights.to(dtype).unbind(1), self.inputs.to(dtype).unbind(1))
        return [MatrixLayerMemory(*own) for own in zip(*fields, strict=True)]


PARTS = rf"""{STACK} | layers.\d+.mixer.(A_log | dt_bias | D | norm_weight)
    | layers.\d+.mixer.(convolution | convolution_bias)
    | layers.\d+.mixer.(query|key|value|output_gate|beta|erase|write|step|norm|output).weight
    | layers.\d+.mixer.(step|output_gate|decay).(up|down).weight
    | layers.\d+.mixer.(output_gate|decay).up.bias
"""
"""Parameters that readers know, see :func:`memspan.models.packing.schema_of`."""

M = TypeVar("M", bound=MatrixMemory)


class MatrixBackbone(Backbone[M]):
    """Base class of stacks over vectors: ``[B, T, D]`` and a memory in, ``[B, T, D]`` and a memory out.

    Results do not depend on where a text is cut into segments. Gradients flow into the memory that is
    passed in: training code calls ``memory.detach()`` between segments.
    """

    layer_type: ClassVar[type[MatrixLayer]]
    knows_documents = True
    implementations: tuple[str, ...] = ("compiled", "chunked", "fla", "reference")
    config: MatrixConfig

    def __init__(self, config: MatrixConfig) -> None:
        check_config(self, config, self.layer_type.mixer_type.options)
        super().__init__(config)
        self.dropout = dropout_layer(config.dropout)
        self.layers = nn.ModuleList(map(self.new_layer, range(config.n_layers)))
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

    def new_layer(self, n: int) -> MatrixLayer:
        """Layer ``n``, counted from 0."""
        return self.layer_type(self.config)

    def stack(self) -> Iterator[MatrixLayer]:
        """The layers, first to last."""
        return iter(self.layers)  # type: ignore[arg-type]

    def row_sizes(self) -> Mapping[str, tuple[int | None, ...]]:
        sizes = self.config.row_sizes().items()
        return {name: (self.config.n_layers, *size) for name, size in sizes}

    def read_piece(
        self,
        x: Tensor,
        memory: M,
        implementation: str | None,
        documents: Documents | None = None,
    ) -> BackboneOutput[M]:
        """See :meth:`Backbone.read_piece`; ``implementation``: of the architecture's rule in
        :mod:`memspan.ops`; ``reference`` also takes the convolution's.
        """
        dtype = torch.promote_types(x.dtype, torch.float32)
        h = self.dropout(x)
        h, after = self.read_layers(h, memory.layers(dtype), implementation, documents)
        memory = self.memory_type(
            count_after(memory.tokens_seen, x.shape[1], documents),
            weights=torch.stack([own.weights for own in after], 1),
            inputs=torch.stack([own.inputs for own in after], 1),
        )
        return BackboneOutput(self.final_norm(h), memory, h.new_zeros(()))

    def read_layers(
        self,
        h: Tensor,
        memories: list[MatrixLayerMemory],
        implementation: str | None,
        documents: Documents | None,
    ) -> tuple[Tensor, list[MatrixLayerMemory]]:
        """Go through the layers: the last one's output, and every layer's memory after the segment."""
        after = []
        for layer, own in zip(self.stack(), memories, strict=True):
            h, own = self.through(layer, h, own, implementation, documents)
            after.append(own)
        return h, after

    def compiled_loops(self) -> bool | None:
        """True if the loops in C can run here."""
        return delta_rules.available(next(self.parameters()))

    def float32_part(self) -> str:
        """All between the products, see :meth:`Backbone.float32_part`."""
        return "matrices are decayed, written and read"
