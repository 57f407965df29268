"""Options of Kimi Delta Attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memspan.models.matrix.options import DeltaConfig

if TYPE_CHECKING:
    from memspan.models.kda.model import KDA


@dataclass(frozen=True)
class KDAConfig(DeltaConfig):
    """Kimi Delta Attention backbone (Kimi Linear, Kimi Team 2025, arXiv 2510.26692)."""

    def build(self) -> KDA:
        from memspan.models.kda.model import KDA

        return KDA(self)
