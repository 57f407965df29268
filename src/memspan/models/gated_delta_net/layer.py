"""One layer of Gated DeltaNet (Yang, Kautz, Hatamizadeh 2024, arXiv 2412.06464), and its memory.

The rule and the convolution themselves are in :mod:`memspan.ops`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memspan.models.known import known
from memspan.nn import FeedForward, dropout_layer, without_padding
from memspan.ops.convolution import short_convolution
from memspan.ops.fast_weights.rules import Chunking, delta_rule
from memspan.trees import LayerMemory, check_config, check_layer

if TYPE_CHECKING:
    from memspan.models.gated_delta_net.config import GatedDeltaNetConfig
    from memspan.models.segments import Documents

EPSILON = 1e-6
"""Inside the roots that normalise queries, keys and outputs."""
PRODUCTS = ("query", "key", "value", "output_gate", "beta", "step")
"""Products of the input, in the order in which a reader has their weights as one matrix."""
SLOWEST = 1e-3
FASTEST = 1e-1
"""Range of softplus(dt_bias) at initialisation, log-uniform, as in Mamba (arXiv 2312.00752)."""


@dataclass(frozen=True, repr=False)
class GatedDeltaNetLayerMemory(LayerMemory):
    """The matrices of one layer and the last inputs of its convolutions, in float32 or better."""

    weights: Tensor
    """``[B, H, K, V]``: keys by values, the paper's S transposed."""
    inputs: Tensor
    """Before the convolutions, oldest first: queries, keys and values side by side,
    ``[B, W - 1, C]``."""


@known("config")
class GatedDeltaRule(nn.Module):
    """One layer's token mixing (section 3.4 and figure 1 of the paper), without a residual or a norm.

    Args:
        config: its width, heads and convolution; what concerns other parts of a model, such as
            ``n_layers``, is not looked at.
    """

    def __init__(self, config: GatedDeltaNetConfig) -> None:
        check_config(self, config, "GatedDeltaNetConfig")
        super().__init__()
        self.config = config
        d = config.d_model
        heads = config.value_heads
        queries, keys, values = config.widths
        self.query = nn.Linear(d, queries, bias=False)
        self.key = nn.Linear(d, keys, bias=False)
        self.value = nn.Linear(d, values, bias=False)
        # Whole models draw it; until then it passes each token on.
        taps = torch.zeros(sum(config.widths), config.convolution)
        taps[:, -1] = 1
        self.convolution = nn.Parameter(taps)
        self.beta = nn.Linear(d, heads, bias=False)
        self.step = nn.Linear(d, heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log_())
        steps = torch.empty(heads).uniform_(math.log(SLOWEST), math.log(FASTEST)).exp_()
        # softplus(dt_bias) is that.
        self.dt_bias = nn.Parameter(steps + (-torch.expm1(-steps)).log())
        self.output_gate = nn.Linear(d, values, bias=False)
        self.norm = nn.RMSNorm(config.value_width, eps=EPSILON)
        self.output = nn.Linear(values, d, bias=False)

    def initial_memory(self, batch_size: int) -> GatedDeltaNetLayerMemory:
        """A memory before the first token, in float32 or better."""
        return GatedDeltaNetLayerMemory.zeros(
            next(self.parameters()), batch_size, row_sizes(self.config)
        )

    def rate(self, dtype: torch.dtype) -> Tensor:
        """``exp(A_log)``, ``[H]``: finite, since the gradient of infinity is NaN."""
        largest = math.floor(math.log(torch.finfo(dtype).max))
        return self.A_log.to(dtype).clamp(max=largest).exp()

    def forward(
        self,
        x: Tensor,
        memory: GatedDeltaNetLayerMemory | None = None,
        implementation: str | None = None,
        documents: Documents | None = None,
    ) -> tuple[Tensor, GatedDeltaNetLayerMemory]:
        """Read ``x [B, T, D]`` after ``memory`` (None: nothing was read), which is not changed: the
        output ``[B, T, D]``, and the memory after the segment. ``implementation``: see
        :func:`memspan.ops.delta_rule`. ``documents``: those of the segment (None: it is one, read on).

        Raises:
            MemspanError: shapes, types or devices do not go together.
        """
        config = self.config
        memory = check_layer(self, x, config.d_model, memory)
        weights = memory.weights
        inputs = memory.inputs
        mixed = torch.cat([self.query(x), self.key(x), self.value(x)], -1)
        beta = self.beta(x)
        step = self.step(x)
        gate = self.output_gate(x)
        starts = None if documents is None else documents.begins
        # Sums over thousands of tokens need float32, whatever precision the products have. fla's
        # kernels add up in float32 themselves, and take what they multiply as it is.
        with torch.autocast(x.device.type, enabled=False):
            if implementation != "fla":
                mixed = mixed.to(weights.dtype)
                beta = beta.to(weights.dtype)
            step = step.to(weights.dtype)
            gate = gate.to(weights.dtype)
            mixed, carried = short_convolution(
                mixed,
                self.convolution.to(mixed.dtype),
                inputs.to(mixed.dtype),
                implementation="reference" if implementation == "reference" else None,
                starts=starts,
                lengths=None if documents is None else documents.lengths,
            )
            q, k, v = F.silu(mixed).split(config.widths, -1)
            q, k = (unit(t.unflatten(-1, (config.n_heads, -1))) for t in (q, k))
            v = v.unflatten(-1, (config.value_heads, -1))
            beta = beta.sigmoid() * (2 if config.negative_eigenvalues else 1)
            log_decay = -self.rate(step.dtype) * F.softplus(step + self.dt_bias)
            if documents is not None:
                # Padding writes nothing, and nothing decays.
                beta, log_decay = (without_padding(t, documents.own()) for t in (beta, log_decay))
            if torch.compiler.is_compiling():
                # The same, but its gradient comes back contiguous: traced, softplus's backward has the
                # strides of its input (torch 2.13), and those of the gradient where it runs.
                log_decay = torch.stack(log_decay.unbind(-1), -1)
            y, weights = delta_rule(
                q.transpose(1, 2) * config.head_width**-0.5,
                k.transpose(1, 2),
                v.transpose(1, 2),
                beta.transpose(1, 2),
                weights,
                log_decay=log_decay.transpose(1, 2),
                chunking=Chunking(config.chunk_size, config.recompute and torch.is_grad_enabled()),
                implementation=implementation,
                starts=starts,
            )
            y = y.transpose(1, 2).to(weights.dtype)
            y = self.norm(y) * F.silu(gate.unflatten(-1, y.shape[2:]))
        memory = GatedDeltaNetLayerMemory(weights, carried.to(inputs.dtype))
        return self.output(y.flatten(2).to(x.dtype)), memory


def unit(x: Tensor) -> Tensor:
    """``x [..., K]`` divided by its length; zeros stay zeros."""
    return x * (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt()


@known()
class GatedDeltaNetLayer(nn.Module):
    """Token mixing and a feed-forward sub-layer, each after a norm and with a residual.

    Args:
        config: as of :class:`GatedDeltaRule`, and the feed-forward's width and dropout.
    """

    def __init__(self, config: GatedDeltaNetConfig) -> None:
        check_config(self, config, "GatedDeltaNetConfig")
        super().__init__()
        self.mixer = GatedDeltaRule(config)
        self.feed_forward = FeedForward(
            config.d_model, config.d_ff, config.activation, config.dropout
        )
        self.mixer_norm = nn.LayerNorm(config.d_model)
        self.feed_forward_norm = nn.LayerNorm(config.d_model)
        self.dropout = dropout_layer(config.dropout)

    def initial_memory(self, batch_size: int) -> GatedDeltaNetLayerMemory:
        """A memory before the first token, in float32 or better."""
        return self.mixer.initial_memory(batch_size)

    def forward(
        self,
        x: Tensor,
        memory: GatedDeltaNetLayerMemory | None = None,
        implementation: str | None = None,
        documents: Documents | None = None,
    ) -> tuple[Tensor, GatedDeltaNetLayerMemory]:
        """Read a segment: arguments, results and errors as in :meth:`GatedDeltaRule.forward`."""
        memory = check_layer(self, x, self.mixer.config.d_model, memory)
        mixed, memory = self.mixer(self.mixer_norm(x), memory, implementation, documents)
        x = x + self.dropout(mixed)
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x))), memory


def row_sizes(config: GatedDeltaNetConfig) -> dict[str, tuple[int, ...]]:
    """The sizes of one row of a layer's memory."""
    return {
        "weights": (config.value_heads, config.head_width, config.value_width),
        "inputs": (config.convolution - 1, sum(config.widths)),
    }
