"""Base class of architectures around another, which reads each block from an empty memory."""

from __future__ import annotations

from typing import Any

from torch import nn

from memspan.models.defaults import M
from memspan.models.protocol import Backbone


class Wrapper(Backbone[M]):
    """A backbone around another, by whose layers and implementations it computes."""

    backbone: Backbone[Any]

    def wrap(self, backbone: Backbone[Any]) -> None:
        """Keep the backbone, as the last of the modules."""
        self.backbone = backbone
        self.implementations = backbone.implementations

    @property
    def layers(self) -> nn.ModuleList:  # type: ignore[override]
        """The backbone's."""
        return self.backbone.layers

    @property
    def recompute(self) -> bool:  # type: ignore[override]
        """See :attr:`Backbone.recompute`: of the backbone's layers."""
        return self.backbone.recompute

    @recompute.setter
    def recompute(self, wanted: bool) -> None:
        self.backbone.recompute = wanted

    def units(self) -> list[nn.Module]:
        return self.backbone.units()

    def compiled_loops(self) -> bool | None:
        return self.backbone.compiled_loops()

    def float32_part(self) -> str | None:
        return self.backbone.float32_part()
