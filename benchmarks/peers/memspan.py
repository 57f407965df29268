"""Ours: every architecture as the function that its peer computes."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from memspan.models import LanguageModel
from memspan.models.compressive.config import CompressiveConfig
from memspan.models.fast_weights.config import FastWeightsConfig
from memspan.models.feedback.config import FeedbackConfig
from memspan.models.gated_delta_net.config import GatedDeltaNetConfig
from memspan.models.options import BackboneConfig, EmbeddingConfig
from memspan.models.transformer_xl.config import TransformerXLConfig
from peers.side import VOCAB_SIZE, Side, Size


def sizes(size: Size) -> dict[str, Any]:
    return {name: getattr(size, name) for name in ("n_layers", "d_model", "n_heads", "d_ff")}


def positions(size: Size) -> dict[str, Any]:
    """labml's: learned, with biases."""
    span = {"memory_length": size.memory_length, "max_distance": size.span}
    return span | {"positions": "learned", "attention_bias": True}


class Memspan(Side):
    """The model in training, every segment with an empty memory; its reader otherwise."""

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        embedding = EmbeddingConfig(tie=False, scale=False)
        self.model: LanguageModel = LanguageModel(VOCAB_SIZE, self.config(), embedding)

    @abstractmethod
    def config(self) -> BackboneConfig:
        """Options of the backbone."""

    def forget(self, batch_size: int) -> None:
        self.reader = None if self.model.training else self.model.reader(batch_size=batch_size)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.model(tokens, targets=targets).loss

    def read(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            return self.reader.read(tokens)
        return self.reader.read(tokens, targets=targets)

    def embedding(self) -> torch.nn.Parameter:
        return self.model.embedding.tables[0]


class MemspanXL(Memspan):
    """Memory is carried in training, too."""

    def config(self) -> BackboneConfig:
        return TransformerXLConfig(**sizes(self.size), **positions(self.size))

    def forget(self, batch_size: int) -> None:
        self.memory = self.model.initial_memory(batch_size)
        super().forget(batch_size)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        out = self.model(tokens, self.memory, targets=targets)
        self.memory = out.memory.detach()
        return out.loss


class MemspanCompressive(MemspanXL):
    def config(self) -> BackboneConfig:
        return CompressiveConfig(
            **sizes(self.size),
            **positions(self.size),
            compressed_length=self.size.compressed_length,
            auxiliary_loss="attention" if self.size.auxiliary_loss else "none",
            # Without its own loss, the task must train it, or the config is refused.
            task_gradient=not self.size.auxiliary_loss,
        )


class MemspanFeedback(Memspan):
    """Every segment starts with an empty memory, in reading as well, as labml's does.

    Single tokens continue from the last segment, soon with a full memory of twice its length, where
    labml's start again.
    """

    def config(self) -> BackboneConfig:
        return FeedbackConfig(
            **sizes(self.size),
            memory_length=self.size.memory_length,
            attention_bias=True,
            memory_norm=False,
            dropout=self.size.dropout,
            attention_dropout=self.size.dropout,
        )

    def read(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        if tokens.shape[1] > 1:
            self.forget(len(tokens))
        return super().read(tokens, targets)


class MemspanFW(Memspan):
    """Without the norm that labml has and never uses."""

    works = ("train", "attention", "generate")

    def config(self) -> BackboneConfig:
        return FastWeightsConfig(**sizes(self.size), norm="feed-forward")

    def attention(self, x: Tensor) -> Tensor:
        backbone = self.model.backbone
        memory = backbone.initial_memory(len(x))
        own = memory.layers(memory.weights.dtype)[0]
        y, _ = next(backbone.stack()).attention(x, own)
        return y


class MemspanGated(Memspan):
    def config(self) -> BackboneConfig:
        return GatedDeltaNetConfig(**sizes(self.size))
