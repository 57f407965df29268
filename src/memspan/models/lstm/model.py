"""LSTM (Hochreiter and Schmidhuber 1997), PyTorch's own: the baseline whose memory is its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from memspan.memory import Memory
from memspan.models.initialisation import initialise
from memspan.models.known import known
from memspan.models.lstm.config import LSTMConfig
from memspan.models.output import BackboneOutput
from memspan.models.packing import Watch, schema_of
from memspan.models.protocol import Backbone
from memspan.models.readers import PassReader
from memspan.nn import dropout_layer
from memspan.trees import check_config

PARAMETERS = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
"""Each layer's ``W_i``, ``W_h`` and their biases, for the gates i, f, g, o."""


@dataclass(frozen=True, repr=False)
class LSTMMemory(Memory):
    """The state of every layer after the last token."""

    output: Tensor
    """``h``, ``[B, L, D]``."""
    cell: Tensor
    """``c``, ``[B, L, D]``."""


@known("config")
class LSTM(Backbone[LSTMMemory]):
    """The stack over vectors. Reading does not depend on how a text is cut."""

    memory_type = LSTMMemory
    config: LSTMConfig

    def __init__(self, config: LSTMConfig) -> None:
        check_config(self, config, "LSTMConfig")
        super().__init__(config)
        self.dropout = dropout_layer(config.dropout)
        d = config.d_model
        self.layers = nn.ModuleList(nn.LSTM(d, d, batch_first=True) for _ in range(config.n_layers))
        initialise(self, config.initialisation, config.n_layers)
        if config.initialisation == "scaled":
            for layer in self.layers:
                # The forget gates begin open (Jozefowicz et al. 2015); torch's order is i, f, g, o.
                nn.init.ones_(layer.get_parameter("bias_ih_l0")[d : 2 * d])
        self.schema = schema_of(self, r"dropout | layers.\d+.(weight|bias)_(ih|hh)_l0")

    def row_sizes(self) -> Mapping[str, tuple[int | None, ...]]:
        state = (self.config.n_layers, self.config.d_model)
        return {"output": state, "cell": state}

    def read_piece(
        self, x: Tensor, memory: LSTMMemory, implementation: str | None
    ) -> BackboneOutput[LSTMMemory]:
        by_token = implementation == "reference" and self.is_as_made()
        h = self.dropout(x.to(next(self.parameters()).dtype))
        states = []
        with torch.autocast(x.device.type, enabled=False):
            for n, layer in enumerate(self.layers):
                before = memory.output[:, n].to(h), memory.cell[:, n].to(h)
                if by_token:
                    h, state = self.through(step_by_step, layer, h, *before)
                else:
                    h, state = self.through(layer, h, tuple(t[None].contiguous() for t in before))
                states.append(state)
                h = self.dropout(h)
        output, cell = (torch.stack([t[0] for t in ts], 1) for ts in zip(*states, strict=True))
        memory = LSTMMemory(memory.tokens_seen + x.shape[1], output, cell)
        return BackboneOutput(h, memory, h.new_zeros(()))

    def reader_type(self) -> type[LSTMReader]:
        return LSTMReader

    def float32_part(self) -> str:
        """The recurrence; not every processor has it in bfloat16."""
        return "the LSTM is computed"


class LSTMReader(PassReader[LSTMMemory]):
    """Reads by passes, and steps by PyTorch's cells: on a CPU a pass of one token takes four times as
    long."""

    def __init__(self, backbone: LSTM, memory: LSTMMemory) -> None:
        super().__init__(backbone, memory)
        self.watch = Watch(backbone)
        self._weights = [[getattr(layer, name) for name in PARAMETERS] for layer in backbone.layers]

    def _read_vectors(self, x: Tensor, starts: Tensor | None) -> Tensor:
        self.watch.refuse_changes()
        return super()._read_vectors(x, starts)

    def _step_on(self, x: Tensor) -> Tensor:
        if self._backbone.training:
            return super()._step_on(x)
        self.watch.refuse_changes()
        memory = self.memory
        dtype = self._weights[0][0].dtype
        states = []
        before = (memory.output.to(dtype).unbind(1), memory.cell.to(dtype).unbind(1))
        h = x.to(dtype)
        with torch.autocast(x.device.type, enabled=False):
            for weights, state in zip(self._weights, zip(*before, strict=True), strict=True):
                h, cell = torch.lstm_cell(h, state, *weights)
                states.append((h, cell))
        output, cell = (torch.stack(each, 1) for each in zip(*states, strict=True))
        self.memory = LSTMMemory(memory.tokens_seen + 1, output, cell)
        return h


def step_by_step(
    layer: nn.Module, x: Tensor, h: Tensor, c: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The equations of ``torch.nn.LSTM``, token by token."""
    w, r, b, b_r = [getattr(layer, name) for name in PARAMETERS]
    outputs = []
    for x_t in x.unbind(1):
        i, f, g, o = (x_t @ w.T + b + h @ r.T + b_r).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        outputs.append(h)
    return torch.stack(outputs, 1), (h[None], c[None])
