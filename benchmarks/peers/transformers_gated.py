"""Gated-delta layers of transformers' Qwen3-Next, between our norms and feed-forward layers.

On a CPU they compute with the library's own fallback, in PyTorch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import DynamicCache, Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from memspan.nn import FeedForward
from peers.side import VOCAB_SIZE, Side, Size


class Layer(nn.Module):
    def __init__(self, config: Qwen3NextConfig, index: int, size: Size) -> None:
        super().__init__()
        self.mixer = Qwen3NextGatedDeltaNet(config, index)
        self.feed_forward = FeedForward(size.d_model, size.d_ff, "relu", 0.0)
        self.mixer_norm = nn.LayerNorm(size.d_model)
        self.feed_forward_norm = nn.LayerNorm(size.d_model)

    def forward(self, x: Tensor, cache: DynamicCache | None) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x), cache)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Model(nn.Module):
    """Embedding, layers, norm and output."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.d_model // size.n_heads
        self.config = Qwen3NextConfig(
            hidden_size=size.d_model,
            num_hidden_layers=size.n_layers,
            layer_types=["linear_attention"] * size.n_layers,
            linear_num_key_heads=size.n_heads,
            linear_num_value_heads=size.n_heads,
            linear_key_head_dim=width,
            linear_value_head_dim=width,
        )
        self.embedding = nn.Embedding(VOCAB_SIZE, size.d_model)
        self.layers = nn.ModuleList(Layer(self.config, n, size) for n in range(size.n_layers))
        self.final_norm = nn.LayerNorm(size.d_model)
        self.head = nn.Linear(size.d_model, VOCAB_SIZE)

    def forward(self, tokens: Tensor, cache: DynamicCache | None = None) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cache)
        return self.head(self.final_norm(x))


class TransformersGated(Side):
    """In training without its cache, otherwise with it."""

    same_function = True

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self.model = Model(size)

    def forget(self, batch_size: int) -> None:
        self.cache = None if self.model.training else DynamicCache(config=self.model.config)

    def logits(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, self.cache)

    def embedding(self) -> Tensor:
        return self.model.embedding.weight

    @torch.no_grad()
    def weights_to(self, ours: nn.Module) -> None:
        theirs = self.model.state_dict()
        own = dict(ours.state_dict())
        own["embedding.tables.0"] = theirs["embedding.weight"]
        own["head.tables.0"] = theirs["head.weight"]
        own["head.biases.0"] = theirs["head.bias"]
        alike = ("A_log", "dt_bias", "norm.weight")
        for name, tensor in theirs.items():
            layer, _, part = name.partition(".mixer.")
            mixer = f"backbone.{layer}.mixer."
            if part in alike:
                own[mixer + part] = tensor
            elif part == "conv1d.weight":
                own[mixer + "convolution"] = tensor[:, 0]
            elif part == "out_proj.weight":
                own[mixer + "output.weight"] = tensor
            elif part:
                # Fused, head by head: queries, keys, values and gates; betas and steps.
                wide = part == "in_proj_qkvz.weight"
                names = ("query", "key", "value", "output_gate") if wide else ("beta", "step")
                heads = tensor.unflatten(0, (self.size.n_heads, len(names), -1))
                for own_name, rows in zip(names, heads.unbind(1), strict=True):
                    own[f"{mixer}{own_name}.weight"] = rows.flatten(0, 1)
            elif name.startswith(("layers", "final_norm")):
                own[f"backbone.{name}"] = tensor
        ours.load_state_dict(own)
