"""labml's Transformer-XL, assembled and masked, with its memory merged, as in its own experiment."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from labml_nn.transformers.feed_forward import FeedForward
from labml_nn.transformers.utils import subsequent_mask
from labml_nn.transformers.xl import TransformerXL, TransformerXLLayer
from labml_nn.transformers.xl.relative_mha import RelativeMultiHeadAttention
from torch import Tensor, nn

from peers.side import VOCAB_SIZE, Side, Size


class AutoregressiveModel(nn.Module):
    """``labml_nn.transformers.xl.experiment.AutoregressiveModel``, without the experiment's imports."""

    def __init__(self, n_vocab: int, d_model: int, transformer: TransformerXL) -> None:
        super().__init__()
        self.src_embed = nn.Embedding(n_vocab, d_model)
        self.transformer = transformer
        self.generator = nn.Linear(d_model, n_vocab)
        self.mask_x: Tensor | None = None
        self.mask_mem: Tensor | None = None

    def forward(self, x: Tensor, mem: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        m_len = len(mem[0]) if mem else 0
        if self.mask_x is None or self.mask_x.shape[0] < len(x):
            self.mask_x = subsequent_mask(len(x))
        if (
            self.mask_mem is None
            or self.mask_mem.shape[1] < m_len
            or self.mask_mem.shape[0] < len(x)
        ):
            self.mask_mem = self.mask_x.new_ones(len(x), m_len, 1)
        mask = self.mask_x[: len(x), : len(x)]
        if m_len:
            mask = torch.cat((self.mask_mem[: len(x), :m_len], mask), dim=1)
        hidden, mem = self.transformer(self.src_embed(x), mem, mask)
        return self.generator(hidden), mem


class LabmlXL(Side):
    """Unchanged: its position tables have 8,192 rows in every layer, whatever the span."""

    same_function = True

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        layer = TransformerXLLayer(
            d_model=size.d_model,
            self_attn=RelativeMultiHeadAttention(size.n_heads, size.d_model, 0.0),
            feed_forward=FeedForward(size.d_model, size.d_ff, 0.0),
            dropout_prob=0.0,
        )
        stack = TransformerXL(layer, size.n_layers)
        self.model = AutoregressiveModel(VOCAB_SIZE, size.d_model, stack)
        self.number_tables()

    def number_tables(self) -> None:
        for block in self.model.transformer.layers:
            attention = block.self_attn
            # Initially zero in labml: filled with numbers, so that the comparison covers them.
            for table in (
                attention.key_pos_embeddings,
                attention.key_pos_bias,
                attention.query_pos_bias,
            ):
                nn.init.normal_(table, std=0.02)

    def forget(self, batch_size: int) -> None:
        self.memory: list[Tensor] = []

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self._forward(tokens).flatten(0, 1), targets.t().flatten())

    @torch.no_grad()
    def read(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = self._forward(tokens)
        if targets is None:
            return logits.transpose(0, 1)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.t().flatten(), reduction="none")
        return losses.view(logits.shape[:2]).t()

    def _forward(self, tokens: Tensor) -> Tensor:
        """Batch first in, time first out, as in labml."""
        logits, new = self.model(tokens.t(), self.memory)
        self.memory = self._merge(self.memory, new)
        return logits

    def _merge(self, old: list[Tensor], new: list[Tensor]) -> list[Tensor]:
        """The experiment's ``merge_memory``."""
        memory = [torch.cat(pair) for pair in zip(old, new, strict=True)] if old else new
        if len(memory[0]) > self.size.memory_length:
            memory = [m[-self.size.memory_length :] for m in memory]
        return memory

    def embedding(self) -> nn.Parameter:
        return self.model.src_embed.weight

    @torch.no_grad()
    def weights_to(self, ours: nn.Module) -> None:
        ours.load_state_dict(self.own_weights())

    def own_weights(self) -> dict[str, Tensor]:
        """Theirs under our names."""
        source, own = self.model.state_dict(), {}
        own["embedding.tables.0"] = source["src_embed.weight"]
        own["head.tables.0"] = source["generator.weight"]
        own["head.biases.0"] = source["generator.bias"]
        for kind in ("weight", "bias"):
            own[f"backbone.final_norm.{kind}"] = source[f"transformer.norm.{kind}"]
        names = {
            "attention.query.weight": "self_attn.query.linear.weight",
            "attention.key.weight": "self_attn.key.linear.weight",
            "attention.value.weight": "self_attn.value.linear.weight",
            "attention.value.bias": "self_attn.value.linear.bias",
            "attention.output.weight": "self_attn.output.weight",
            "attention.output.bias": "self_attn.output.bias",
            "feed_forward.inner.weight": "feed_forward.layer1.weight",
            "feed_forward.inner.bias": "feed_forward.layer1.bias",
            "feed_forward.outer.weight": "feed_forward.layer2.weight",
            "feed_forward.outer.bias": "feed_forward.layer2.bias",
            "attention_norm.weight": "norm_self_attn.weight",
            "attention_norm.bias": "norm_self_attn.bias",
            "feed_forward_norm.weight": "norm_ff.weight",
            "feed_forward_norm.bias": "norm_ff.bias",
        }
        biases = []
        for n, block in enumerate(self.model.transformer.layers):
            here, there = f"backbone.layers.{n}.", f"transformer.layers.{n}."
            for mine, theirs in names.items():
                own[here + mine] = source[there + theirs]
            attention = block.self_attn
            # Their row P - d belongs to distance d.
            rows = attention.P - torch.arange(self.size.span)
            own[here + "attention.position_keys"] = attention.key_pos_embeddings[rows]
            own[here + "attention.position_scores"] = attention.key_pos_bias[rows]
            biases.append(attention.query_pos_bias)
        own["backbone.content_bias"] = torch.stack(biases)
        return own


class LabmlShortTable(LabmlXL):
    """The same with position tables cut to the span, as its users could do."""

    works = ("train",)

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        for block in self.model.transformer.layers:
            attention = block.self_attn
            rows = slice(attention.P - size.span, attention.P + size.segment_length)
            for name in ("key_pos_embeddings", "key_pos_bias"):
                table = getattr(attention, name).detach()[rows].clone()
                setattr(attention, name, nn.Parameter(table))
            attention.P = size.span
