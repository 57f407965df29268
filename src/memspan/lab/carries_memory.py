"""Adapts language models and backbones to the state laws."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from memspan.errors import MemspanError
from memspan.memory import Memory
from memspan.models.language_model import LanguageModel
from memspan.models.output import BackboneOutput, Output
from memspan.models.protocol import Backbone
from statelaws import Claims, Inputs, RefusedError


class CarriesMemory:
    """A :class:`LanguageModel` or a :class:`Backbone`, whose state is its memory."""

    def __init__(self, module: LanguageModel | Backbone[Any]) -> None:
        self.module: nn.Module = module
        self._model = module
        if isinstance(module, LanguageModel):
            backbone = module.backbone
            self.inputs = Inputs(vocab_size=module.vocab_size)
        else:
            dtype = next(module.parameters()).dtype
            backbone = module
            self.inputs = Inputs(width=module.config.d_model, dtype=dtype)
        self.claims = Claims(
            cuts=backbone.cut_invariant(),
            padding=frozenset({"right", "left", "left-continued"}),
            lengths={name: n for name, n in backbone.initial_memory(1).slots().items() if n > 1},
        )

    def start(self, batch_size: int) -> Memory:
        return self._model.initial_memory(batch_size)

    def read_padded(
        self, inputs: Tensor, state: Memory, lengths: Tensor, side: Literal["right", "left"]
    ) -> tuple[Tensor, Memory]:
        return self.read(inputs, state, lengths=lengths, padding=side)

    def read_packed(self, inputs: Tensor, state: Memory, starts: Tensor) -> tuple[Tensor, Memory]:
        return self.read(inputs, state, starts=starts)

    def read(self, inputs: Tensor, state: Memory, **options: Any) -> tuple[Tensor, Memory]:
        try:
            output: Output | BackboneOutput[Memory] = self._model(inputs, state, **options)
        except MemspanError as error:
            raise RefusedError(str(error)) from None
        if isinstance(output, BackboneOutput):
            return output.hidden, output.memory
        assert output.logits is not None
        return output.logits, output.memory

    def select(self, state: Memory, rows: Tensor) -> Memory:
        return state.select(rows)

    def reset(self, state: Memory, rows: Tensor) -> Memory:
        return state.reset(rows)

    def copy(self, state: Memory) -> Memory:
        return state.detach().map(torch.clone)

    def save(self, state: Memory, path: Path) -> None:
        state.save(path, self._fingerprint())

    def load(self, path: Path) -> Memory:
        return type(self.start(1)).load(path, self._fingerprint())

    def _fingerprint(self) -> str:
        # A backbone's files are its user's to tell apart.
        return self._model.fingerprint() if isinstance(self._model, LanguageModel) else ""
