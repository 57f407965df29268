"""Gated linear attention (Yang et al. 2023, arXiv 2312.06635): memory and stack. Options:
:class:`memspan.models.GLAConfig`. One layer: ``layer.py``."""

from __future__ import annotations

from dataclasses import dataclass

from memspan.models.gla.config import GLAConfig
from memspan.models.gla.layer import GLALayer
from memspan.models.known import known
from memspan.models.matrix.backbone import MatrixBackbone, MatrixMemory
from memspan.models.readers import BackboneReader


@dataclass(frozen=True, repr=False)
class GLAMemory(MatrixMemory):
    """The matrices of every layer and head, in float32 or better; no inputs are carried."""


@known("config")
class GLA(MatrixBackbone[GLAMemory]):
    """The stack over vectors: ``[B, T, D]`` and a memory in, ``[B, T, D]`` and a memory out."""

    memory_type = GLAMemory
    layer_type = GLALayer
    config: GLAConfig

    def reader_type(self) -> type[BackboneReader[GLAMemory]]:
        from memspan.models.gla.reader import GLAReader

        return GLAReader
