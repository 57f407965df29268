"""Gated DeltaNet 2, as in flash-linear-attention 0.6.0: memory and stack. Options:
:class:`memspan.models.GatedDeltaNet2Config`. One layer: ``layer.py``."""

from __future__ import annotations

from dataclasses import dataclass

from memspan.models.gated_delta_net_2.config import GatedDeltaNet2Config
from memspan.models.gated_delta_net_2.layer import GatedDeltaNet2Layer
from memspan.models.known import known
from memspan.models.matrix.backbone import MatrixBackbone, MatrixMemory
from memspan.models.readers import BackboneReader


@dataclass(frozen=True, repr=False)
class GatedDeltaNet2Memory(MatrixMemory):
    """The matrices of every layer and head and the last inputs of the convolutions, queries, keys and
    values side by side, in float32 or better."""


@known("config")
class GatedDeltaNet2(MatrixBackbone[GatedDeltaNet2Memory]):
    """The stack over vectors: ``[B, T, D]`` and a memory in, ``[B, T, D]`` and a memory out."""

    memory_type = GatedDeltaNet2Memory
    layer_type = GatedDeltaNet2Layer
    config: GatedDeltaNet2Config

    def reader_type(self) -> type[BackboneReader[GatedDeltaNet2Memory]]:
        from memspan.models.gated_delta_net_2.reader import GatedDeltaNet2Reader

        return GatedDeltaNet2Reader
