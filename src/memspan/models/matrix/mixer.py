"""Layers whose memory is a matrix per head: their base classes, and the parts that they share.

A mixer is one layer's token mixing. The rules and the convolution themselves are in :mod:`memspan.ops`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memspan.models.known import known
from memspan.nn import FeedForward, dropout_layer, without_padding
from memspan.ops.convolution import short_convolution
from memspan.ops.fast_weights.rules import Chunking
from memspan.trees import LayerMemory, check_config, check_layer

if TYPE_CHECKING:
    from memspan.models.matrix.options import ConvolvedConfig, MatrixConfig
    from memspan.models.segments import Documents

EPSILON = 1e-6
"""Inside the roots that normalise queries, keys and outputs."""
SLOWEST = 1e-3
FASTEST = 1e-1
"""Range of softplus(dt_bias) at initialisation, log-uniform, as in Mamba (arXiv 2312.00752)."""


@dataclass(frozen=True, repr=False)
class MatrixLayerMemory(LayerMemory):
    """The matrices of one layer and the last inputs that it carries, in float32 or better."""

    weights: Tensor
    """``[B, H, K, V]``: keys by values."""
    inputs: Tensor
    """Before the convolution or token shift, oldest first, ``[B, W - 1, C]``."""


@dataclass(frozen=True)
class Reading:
    """A segment's documents, and the way its rule is computed."""

    implementation: str | None
    """A name of the rule's, see :meth:`MatrixMixer.forward`."""
    documents: Documents | None
    chunking: Chunking

    def written(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Each ``[B, T, ...]`` with zeros in padding: with logarithms of decays and what is written at
        zero, padding changes no memory."""
        if self.documents is None:
            return tensors
        own = self.documents.own()
        return tuple(without_padding(t.flatten(2), own).view_as(t) for t in tensors)

    def rule(self) -> dict[str, Any]:
        """Arguments of the rules in :mod:`memspan.ops` that say how to compute, and where documents
        start."""
        return {
            "chunking": self.chunking,
            "implementation": self.implementation,
            "starts": None if self.documents is None else self.documents.begins,
        }

    def rounded(self, like: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Arguments of a rule as they are; for fla's kernels, which add up in float32 themselves, in
        the type in which autocast computed ``like``."""
        if self.implementation != "fla":
            return tensors
        return tuple(t.to(like.dtype) for t in tensors)

    def convolve(self, x: Tensor, weight: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """:func:`memspan.ops.short_convolution` of ``x [B, T, C]``, and the inputs to carry on."""
        documents = self.documents
        y, carried = short_convolution(
            x,
            weight.to(x.dtype),
            inputs.to(x.dtype),
            implementation="reference" if self.implementation == "reference" else None,
            starts=None if documents is None else documents.begins,
            lengths=None if documents is None else documents.lengths,
        )
        return y, carried.to(inputs.dtype)

    def shift(self, x: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The token before each of ``x [B, T, D]``, after ``inputs [B, 1, D]``, and the last one."""
        before = torch.eye(1, 2, dtype=x.dtype, device=x.device).expand(x.shape[2], 2)
        return self.convolve(x, before, inputs)


class MatrixMixer(nn.Module):
    """Base class of one layer's token mixing by matrices, without a residual or a norm.

    Args:
        config: its width, heads and rule; what concerns other parts of a model, such as ``n_layers``,
            is not looked at.
    """

    options: ClassVar[str]
    """The name of its config's class."""
    output: nn.Linear

    def __init__(self, config: MatrixConfig) -> None:
        check_config(self, config, self.options)
        super().__init__()
        self.config: Any = config

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Products of the input ``[B, T, D]``, in whatever precision training has."""
        raise NotImplementedError

    def mix(
        self, projected: tuple[Tensor, ...], memory: MatrixLayerMemory, reading: Reading
    ) -> tuple[Tensor, MatrixLayerMemory]:
        """Write and read, without autocast: the heads' outputs ``[B, T, H, V]``, normalised and gated,
        and the memory after the segment."""
        raise NotImplementedError

    def reading(self, implementation: str | None, documents: Documents | None) -> Reading:
        """The segment's, with the options' chunks."""
        recompute = self.config.recompute and torch.is_grad_enabled()
        return Reading(implementation, documents, Chunking(self.config.chunk_size, recompute))

    def initial_memory(self, batch_size: int) -> MatrixLayerMemory:
        """A memory before the first token, in float32 or better."""
        sizes = self.config.row_sizes()
        return MatrixLayerMemory.zeros(next(self.parameters()), batch_size, sizes)

    def forward(
        self,
        x: Tensor,
        memory: MatrixLayerMemory | None = None,
        implementation: str | None = None,
        documents: Documents | None = None,
    ) -> tuple[Tensor, MatrixLayerMemory]:
        """Read ``x [B, T, D]`` after ``memory`` (None: nothing was read), which is not changed: the
        output ``[B, T, D]``, and the memory after the segment. ``implementation``: see
        :meth:`Backbone.forward`. ``documents``: those of the segment (None: it is one, read on).

        Raises:
            MemspanError: shapes, types or devices do not go together.
        """
        memory = check_layer(self, x, self.config.d_model, memory)
        reading = self.reading(implementation, documents)
        projected = self.project(x)
        # Sums over thousands of tokens need float32, whatever precision the products have.
        with torch.autocast(x.device.type, enabled=False):
            y, memory = self.mix(projected, memory, reading)
        return self.output(y.flatten(2).to(x.dtype)), memory


class ConvolvedMixer(MatrixMixer):
    """Base class of mixers whose queries, keys and values pass a short convolution and SiLU."""

    def __init__(self, config: ConvolvedConfig) -> None:
        super().__init__(config)
        queries, keys, values = config.widths
        self.query = nn.Linear(config.d_model, queries, bias=False)
        self.key = nn.Linear(config.d_model, keys, bias=False)
        self.value = nn.Linear(config.d_model, values, bias=False)
        self.convolution = taps(sum(config.widths), config.convolution)

    def mixed(self, x: Tensor) -> Tensor:
        """Queries, keys and values side by side, ``[B, T, C]``."""
        return torch.cat([self.query(x), self.key(x), self.value(x)], -1)


class DeltaMixer(ConvolvedMixer):
    """Base class of mixers with a delta rule, whose queries and keys have length 1."""

    def heads(
        self, mixed: Tensor, inputs: Tensor, reading: Reading
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries and keys ``[B, H_k, T, K]`` and values ``[B, H, T, V]``, queries divided by
        ``sqrt(K)``, and the inputs to carry on."""
        config = self.config
        mixed, carried = reading.convolve(mixed, self.convolution, inputs)
        q, k, v = F.silu(mixed).split(config.widths, -1)
        q, k = (unit(t.unflatten(-1, (-1, config.head_width))) for t in (q, k))
        v = v.unflatten(-1, (-1, config.value_width))
        q = q.transpose(1, 2) * config.head_width**-0.5
        return q, k.transpose(1, 2), v.transpose(1, 2), carried

    def strength(self, beta: Tensor) -> Tensor:
        """The share of an old value that is replaced, from its logit."""
        return beta.sigmoid() * (2 if self.config.negative_eigenvalues else 1)


@known()
class LowRank(nn.Module):
    """A product of low rank, ``W_up W_down x + b``.

    Args:
        rank: the width between the two.
    """

    def __init__(self, n_inputs: int, rank: int, n_outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.down = nn.Linear(n_inputs, rank, bias=False)
        self.up = nn.Linear(rank, n_outputs, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., n_inputs] -> [..., n_outputs]``."""
        return self.up(self.down(x))  # type: ignore[no-any-return]


def unit(x: Tensor) -> Tensor:
    """``x [..., K]`` divided by its length; zeros stay zeros."""
    return x * (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt()


def taps(channels: int, width: int) -> nn.Parameter:
    """A convolution's weights ``[C, W]``. Whole models draw them; until then each token passes on."""
    weight = torch.zeros(channels, width)
    weight[:, -1] = 1
    return nn.Parameter(weight)


def decay_rates(count: int) -> nn.Parameter:
    """``A_log``, so that ``exp(A_log)`` is drawn from 1 to 16."""
    return nn.Parameter(torch.empty(count).uniform_(1, 16).log_())


def step_biases(count: int) -> nn.Parameter:
    """``dt_bias``, drawn so that ``softplus(dt_bias)`` lies in ``SLOWEST`` to ``FASTEST``."""
    steps = torch.empty(count).uniform_(math.log(SLOWEST), math.log(FASTEST)).exp_()
    return nn.Parameter(steps + (-torch.expm1(-steps)).log())


def finite_exp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``exp(x)`` in this type: finite, since the gradient of infinity is NaN."""
    largest = math.floor(math.log(torch.finfo(dtype).max))
    return x.to(dtype).clamp(max=largest).exp()


def softplus_decay(step: Tensor, A_log: Tensor, dt_bias: Tensor, reading: Reading) -> Tensor:
    """Logarithms of decays, ``-exp(A_log) softplus(step + dt_bias)``, 0 in padding: of each head, ``[B,
    T, H] -> [B, H, T]``, or of each of its channels, ``[B, T, H K] -> [B, H, T, K]``."""
    (step,) = reading.written(F.softplus(step + dt_bias))
    step = traced_contiguous(step).unflatten(-1, (len(A_log), -1)).transpose(1, 2)
    log_decay = -finite_exp(A_log, step.dtype)[:, None, None] * step
    return log_decay.squeeze(-1) if len(A_log) == len(dt_bias) else log_decay


def traced_contiguous(x: Tensor) -> Tensor:
    """``x``, whose gradient comes back contiguous: traced, softplus's backward has the strides of its
    input (torch 2.13), and those of the gradient where it runs."""
    return torch.stack(x.unbind(-1), -1) if torch.compiler.is_compiling() else x


class MatrixLayer(nn.Module):
    """Token mixing and a feed-forward sub-layer, each after a norm and with a residual.

    Args:
        config: the mixer's, and the feed-forward's width and dropout.
        place: what else the mixer is made of.
    """

    mixer_type: ClassVar[type[MatrixMixer]]

    def __init__(self, config: MatrixConfig, *place: int) -> None:
        check_config(self, config, self.mixer_type.options)
        super().__init__()
        self.mixer = self.mixer_type(config, *place)
        if config.d_ff:
            self.feed_forward = self.new_feed_forward(config, *place)
        self.mixer_norm = nn.LayerNorm(config.d_model)
        if config.d_ff:
            self.feed_forward_norm = nn.LayerNorm(config.d_model)
        self.dropout = dropout_layer(config.dropout)

    def new_feed_forward(self, config: MatrixConfig, *place: int) -> nn.Module:
        """The feed-forward sub-layer."""
        return FeedForward(config.d_model, config.d_ff, config.activation, config.dropout)

    def initial_memory(self, batch_size: int) -> MatrixLayerMemory:
        """A memory before the first token, in float32 or better."""
        sizes = self.mixer.config.row_sizes()
        return MatrixLayerMemory.zeros(next(self.parameters()), batch_size, sizes)

    def forward(
        self,
        x: Tensor,
        memory: MatrixLayerMemory | None = None,
        implementation: str | None = None,
        documents: Documents | None = None,
    ) -> tuple[Tensor, MatrixLayerMemory]:
        """Read a segment: arguments, results and errors as in :meth:`MatrixMixer.forward`."""
        memory = check_layer(self, x, self.mixer.config.d_model, memory)
        mixed, memory = self.mixer(self.mixer_norm(x), memory, implementation, documents)
        x = x + self.dropout(mixed)
        if not self.mixer.config.d_ff:
            return x, memory
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x))), memory
