"""Options of Gated DeltaNet 2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memspan.models.matrix.options import DeltaConfig

if TYPE_CHECKING:
    from memspan.models.gated_delta_net_2.model import GatedDeltaNet2


@dataclass(frozen=True)
class GatedDeltaNet2Config(DeltaConfig):
    """Gated DeltaNet 2 backbone, in the form that flash-linear-attention 0.6.0 has."""

    negative_eigenvalues: bool = False
    """Let the erase gate lie in (0, 2), not in (0, 1): erasing may reverse the sign of a key's old
    value."""

    def build(self) -> GatedDeltaNet2:
        from memspan.models.gated_delta_net_2.model import GatedDeltaNet2

        return GatedDeltaNet2(self)
