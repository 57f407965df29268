"""A plain GPT, the floor: pre-norm, learned absolute positions, torch's attention, no memory.

Written after nanoGPT's ``model.py`` (Karpathy, MIT licence): no biases, GELU, the output tied to the
embedding, N(0, 0.02) with residual projections scaled by ``1/sqrt(2 n_layers)``.
"""

from __future__ import annotations

import math
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peers.side import VOCAB_SIZE, Side, Size


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + feed_forward(norm(x))``."""

    def __init__(self, d_model: int, n_heads: int, d_ff: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.attention_norm = nn.LayerNorm(d_model, bias=False)
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.attention_output = nn.Linear(d_model, d_model, bias=False)
        self.feed_forward_norm = nn.LayerNorm(d_model, bias=False)
        self.inner = nn.Linear(d_model, d_ff, bias=False)
        self.feed_forward_output = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.n_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_output(y.transpose(1, 2).reshape(batch, length, width))
        y = F.gelu(self.inner(self.feed_forward_norm(x)))
        return x + self.feed_forward_output(y)


class GPT(nn.Module):
    """Tokens ``[B, T]`` to logits ``[B, T, V]``, ``T`` at most ``context``."""

    def __init__(
        self, vocab_size: int, context: int, n_layers: int, n_heads: int, d_model: int, d_ff: int
    ) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.positions = nn.Embedding(context, d_model)
        self.blocks = nn.Sequential(*(Block(d_model, n_heads, d_ff) for _ in range(n_layers)))
        self.norm = nn.LayerNorm(d_model, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith("_output.weight")
                nn.init.normal_(parameter, std=0.02 * ((2 * n_layers) ** -0.5 if residual else 1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.embedding.weight)


class PlainGPT(Side):
    """As a side, segments of the same length: what one costs without memory and relative positions."""

    works = ("train", "evaluate")

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        widths = (size.n_layers, size.n_heads, size.d_model, size.d_ff)
        self.model = GPT(VOCAB_SIZE, size.segment_length, *widths)

    def forget(self, batch_size: int) -> None:
        pass

    def logits(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)


class GPTRun:
    """nanoGPT's recipe for a CPU: random crops, AdamW, 100 steps of warm-up, cosine, no dropout."""

    CONTEXT = 64
    BATCH = 12
    RATE = 1e-3
    WARMUP = 100

    def __init__(self, text: np.ndarray, steps: int, seed: int = 1, rate: float = RATE) -> None:
        self.rate = rate
        torch.manual_seed(seed)
        self.text = torch.from_numpy(text.astype(np.int64))
        self.steps = steps
        self.step = 0
        self.random = torch.Generator().manual_seed(seed)
        self.model = GPT(256, self.CONTEXT, n_layers=4, n_heads=4, d_model=128, d_ff=512)
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
                {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
            ],
            betas=(0.9, 0.99),
            fused=True,
        )

    def update(self) -> None:
        starts = torch.randint(
            len(self.text) - self.CONTEXT, (self.BATCH,), generator=self.random
        ).tolist()
        block = torch.stack([self.text[i : i + self.CONTEXT + 1] for i in starts])
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate()
        logits = self.model(block[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), block[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1

    def train(self, steps: int) -> float:
        """So many updates; the CPU seconds that they took."""
        start = time.process_time()
        for _ in range(steps):
            self.update()
        return time.process_time() - start

    def score(self, text: np.ndarray, stride: int = CONTEXT) -> float:
        """Nats per character in windows of ``CONTEXT``, of which the last ``stride`` count.

        A stride of ``CONTEXT`` is what nanoGPT does: each character once, half a context on average.
        A smaller one gives each character nearly a full context, at a multiple of the cost.
        """
        characters = torch.from_numpy(text.astype(np.int64))
        windows = characters.unfold(0, self.CONTEXT + 1, stride)
        total = 0.0
        count = 0
        with torch.no_grad():
            for block in windows.split(64):
                losses = F.cross_entropy(
                    self.model(block[:, :-1]).transpose(1, 2), block[:, 1:], reduction="none"
                )[:, -stride:]
                total = total + losses.sum().item()
                count = count + losses.numel()
        return total / count

    def _learning_rate(self) -> float:
        if self.step < self.WARMUP:
            return self.rate * (self.step + 1) / self.WARMUP
        done = (self.step - self.WARMUP) / (self.steps - self.WARMUP)
        return self.rate * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)
