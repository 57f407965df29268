"""Kimi Delta Attention (Kimi Linear, Kimi Team 2025, arXiv 2510.26692): memory and stack.

Differs from the paper: all layers are of this kind, where Kimi Linear has attention in every fourth.
Options: :class:`memspan.models.KDAConfig`. One layer: ``layer.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from memspan.models.kda.config import KDAConfig
from memspan.models.kda.layer import KDALayer
from memspan.models.known import known
from memspan.models.matrix.backbone import MatrixBackbone, MatrixMemory
from memspan.models.readers import BackboneReader


@dataclass(frozen=True, repr=False)
class KDAMemory(MatrixMemory):
    """The matrices of every layer and head and the last inputs of the convolutions, queries, keys and
    values side by side, in float32 or better."""


@known("config")
class KDA(MatrixBackbone[KDAMemory]):
    """The stack over vectors: ``[B, T, D]`` and a memory in, ``[B, T, D]`` and a memory out."""

    memory_type = KDAMemory
    layer_type = KDALayer
    config: KDAConfig

    def reader_type(self) -> type[BackboneReader[KDAMemory]]:
        from memspan.models.kda.reader import KDAReader

        return KDAReader
