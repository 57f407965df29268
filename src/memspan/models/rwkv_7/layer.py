"""One layer of RWKV-7 (Peng et al. 2025, arXiv 2503.14456, section 4).

Its two parts are ``time_mixing.py``, which has the memory's rule, and ``channel_mixing.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memspan.models.matrix.mixer import MatrixLayer, MatrixLayerMemory
from memspan.models.rwkv_7.channel_mixing import RWKV7ChannelMixing
from memspan.models.rwkv_7.time_mixing import RWKV7TimeMixing
from memspan.trees import check_layer

if TYPE_CHECKING:
    from memspan.models.segments import Documents


class RWKV7Layer(MatrixLayer):
    """Time mixing and channel mixing, each after a norm and with a residual.

    Args:
        config: as of :class:`RWKV7TimeMixing`, and the feed-forward's width and dropout.
        place: its place in a stack (none: it is the first), see there.
    """

    mixer_type = RWKV7TimeMixing
    mixer: RWKV7TimeMixing

    def new_feed_forward(self, config: Any, *place: int) -> nn.Module:
        return RWKV7ChannelMixing(config, *place)

    def forward(
        self,
        x: Tensor,
        memory: MatrixLayerMemory | None = None,
        implementation: str | None = None,
        documents: Documents | None = None,
        first_values: Tensor | None = None,
        with_values: bool = False,
    ) -> Any:
        """Read a segment: as in :meth:`RWKV7TimeMixing.forward`."""
        memory = check_layer(self, x, self.mixer.config.d_model, memory)
        own, others = memory.inputs.split(x.shape[2], 2)
        before = MatrixLayerMemory(memory.weights, own)
        y, after, first_values = self.mixer(
            self.mixer_norm(x), before, implementation, documents, first_values, True
        )
        x = x + self.dropout(y)
        reading = self.mixer.reading(implementation, documents)
        y, carried = self.feed_forward(self.feed_forward_norm(x), others, reading)
        inputs = torch.cat([after.inputs, carried], 2)
        x = x + self.dropout(y)
        after = MatrixLayerMemory(after.weights, inputs)
        return (x, after, first_values) if with_values else (x, after)
