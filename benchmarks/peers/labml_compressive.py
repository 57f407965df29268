"""labml's Compressive Transformer, its memories merged and compressed as in its own experiment."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from labml_nn.transformers.compressive import (
    AttentionReconstructionLoss,
    CompressiveTransformer,
    CompressiveTransformerLayer,
    Conv1dCompression,
)
from labml_nn.transformers.feed_forward import FeedForward
from labml_nn.transformers.utils import subsequent_mask
from labml_nn.transformers.xl.relative_mha import RelativeMultiHeadAttention
from torch import Tensor, nn

from peers.labml_xl import LabmlXL
from peers.side import VOCAB_SIZE, Side, Size

RATE = 4


class AutoregressiveModel(nn.Module):
    """The experiment's model, without the experiment's imports."""

    def __init__(self, n_vocab: int, d_model: int, transformer: CompressiveTransformer) -> None:
        super().__init__()
        self.src_embed = nn.Embedding(n_vocab, d_model)
        self.transformer = transformer
        self.generator = nn.Linear(d_model, n_vocab)

    def forward(
        self, x: Tensor, mem: list[Tensor], c_mem: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        old = (len(mem[0]) if mem else 0) + (len(c_mem[0]) if c_mem else 0)
        mask = subsequent_mask(len(x))
        mask = torch.cat([mask.new_ones(len(x), old, 1), mask], 1)
        hidden, mem = self.transformer(self.src_embed(x), mem, c_mem, mask)
        return self.generator(hidden), mem


class LabmlCompressive(LabmlXL):
    """Unchanged, including its position tables of 8,192 rows."""

    def __init__(self, size: Size) -> None:
        Side.__init__(self, size)
        layer = CompressiveTransformerLayer(
            d_model=size.d_model,
            self_attn=RelativeMultiHeadAttention(size.n_heads, size.d_model, 0.0),
            feed_forward=FeedForward(size.d_model, size.d_ff, 0.0),
            dropout_prob=0.0,
            compress=Conv1dCompression(RATE, size.d_model),
        )
        stack = CompressiveTransformer(layer, size.n_layers)
        self.model = AutoregressiveModel(VOCAB_SIZE, size.d_model, stack)
        self.number_tables()
        self.reconstruction = AttentionReconstructionLoss(self.model.transformer.layers)

    def forget(self, batch_size: int) -> None:
        self.memory: list[Tensor] = []
        self.compressed: list[Tensor] = []

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits, new, to_compress = self._step(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.t().flatten())
        if to_compress and self.size.auxiliary_loss:
            loss = loss + self.reconstruction(new, to_compress)
        return loss

    def _forward(self, tokens: Tensor) -> Tensor:
        return self._step(tokens)[0]

    def _step(self, tokens: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        logits, new = self.model(tokens.t(), self.memory, self.compressed)
        with torch.no_grad():
            to_compress = self._merge_and_compress(new)
        return logits, new, to_compress

    def _merge_and_compress(self, new: list[Tensor]) -> list[Tensor]:
        """The experiment's ``merge_compress_memory``: what was compressed, by layer."""
        memory = new
        if self.memory:
            memory = [torch.cat(pair) for pair in zip(self.memory, new, strict=True)]
        extra = len(memory[0]) - self.size.memory_length
        old = -(-extra // RATE) * RATE if extra > 0 else 0
        to_compress = [m[:old] for m in memory] if old else []
        self.memory = [m[old:] for m in memory]
        if old:
            layers = self.model.transformer.layers
            made = [layer.compress(m) for layer, m in zip(layers, to_compress, strict=True)]
            if self.compressed:
                made = [torch.cat(pair) for pair in zip(self.compressed, made, strict=True)]
            self.compressed = [m[-self.size.compressed_length :] for m in made]
        return to_compress

    @torch.no_grad()
    def weights_to(self, ours: nn.Module) -> None:
        own = self.own_weights()
        for n, block in enumerate(self.model.transformer.layers):
            for kind in ("weight", "bias"):
                own[f"backbone.layers.{n}.compression.{kind}"] = getattr(block.compress.conv, kind)
        ours.load_state_dict(own)
