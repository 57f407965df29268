"""DeltaProduct (Siems et al. 2025, arXiv 2502.10297): memory and stack. Options:
:class:`memspan.models.DeltaProductConfig`. One layer: ``layer.py``."""

from __future__ import annotations

from dataclasses import dataclass

from memspan.models.delta_product.config import DeltaProductConfig
from memspan.models.delta_product.layer import DeltaProductLayer
from memspan.models.known import known
from memspan.models.matrix.backbone import MatrixBackbone, MatrixMemory
from memspan.models.readers import BackboneReader


@dataclass(frozen=True, repr=False)
class DeltaProductMemory(MatrixMemory):
    """The matrices of every layer and head and the last inputs of the convolutions, queries, keys and
    values of all steps side by side, in float32 or better."""


@known("config")
class DeltaProduct(MatrixBackbone[DeltaProductMemory]):
    """The stack over vectors: ``[B, T, D]`` and a memory in, ``[B, T, D]`` and a memory out."""

    memory_type = DeltaProductMemory
    layer_type = DeltaProductLayer
    config: DeltaProductConfig

    def reader_type(self) -> type[BackboneReader[DeltaProductMemory]]:
        from memspan.models.delta_product.reader import DeltaProductReader

        return DeltaProductReader
