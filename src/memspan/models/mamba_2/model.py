"""Mamba-2 (Dao and Gu 2024, arXiv 2405.21060): memory and stack. Options:
:class:`memspan.models.Mamba2Config`. One layer: ``layer.py``."""

from __future__ import annotations

from dataclasses import dataclass

from memspan.models.known import known
from memspan.models.mamba_2.config import Mamba2Config
from memspan.models.mamba_2.layer import Mamba2Layer
from memspan.models.matrix.backbone import MatrixBackbone, MatrixMemory
from memspan.models.readers import BackboneReader


@dataclass(frozen=True, repr=False)
class Mamba2Memory(MatrixMemory):
    """The states of every layer and head and the last inputs of the convolutions, C, B and x side by
    side, in float32 or better."""


@known("config")
class Mamba2(MatrixBackbone[Mamba2Memory]):
    """The stack over vectors: ``[B, T, D]`` and a memory in, ``[B, T, D]`` and a memory out."""

    memory_type = Mamba2Memory
    layer_type = Mamba2Layer
    config: Mamba2Config

    def reader_type(self) -> type[BackboneReader[Mamba2Memory]]:
        from memspan.models.mamba_2.reader import Mamba2Reader

        return Mamba2Reader
