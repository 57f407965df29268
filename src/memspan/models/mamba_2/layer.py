"""One layer of Mamba-2 (Dao and Gu 2024, *Transformers are SSMs*, arXiv 2405.21060, sections 5 and 7).

A state-space model as a matrix memory: its C, B and x are queries, keys and values, and its state, N by
P, is a head's matrix. It decays with one number per head and is only added to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memspan.models.known import known
from memspan.models.matrix.mixer import (
    EPSILON,
    ConvolvedMixer,
    MatrixLayer,
    MatrixLayerMemory,
    Reading,
    decay_rates,
    finite_exp,
    step_biases,
    traced_contiguous,
)
from memspan.ops.delta_rules.rule import generalized_delta_rule

if TYPE_CHECKING:
    from memspan.models.mamba_2.config import Mamba2Config


@known("config")
class Mamba2Mixer(ConvolvedMixer):
    """One layer's token mixing, without a residual or a norm before it.

    With a step ``d`` per head, ``d = softplus(w x + dt_bias)``, and ``C, B [N]``, ``x [P]`` that have
    passed a convolution with a bias and SiLU::

        S' = exp(-d exp(A_log)) S + d B (x) x        y = C S' + D x

    The output is ``RMSNorm(y * SiLU(gate))`` over all heads of a group together.

    Args:
        config: its width, heads, state and convolution; the rest of a model's is not looked at.
    """

    options = "Mamba2Config"

    def __init__(self, config: Mamba2Config) -> None:
        super().__init__(config)
        channels, _ = self.convolution.shape
        inner = config.widths[-1]
        self.convolution_bias = nn.Parameter(torch.zeros(channels))
        self.step = nn.Linear(config.d_model, config.n_heads, bias=False)
        self.A_log = decay_rates(config.n_heads)
        self.dt_bias = step_biases(config.n_heads)
        self.D = nn.Parameter(torch.ones(config.n_heads))
        self.output_gate = nn.Linear(config.d_model, inner, bias=False)
        self.norm_weight = nn.Parameter(torch.ones(inner))
        self.output = nn.Linear(inner, config.d_model, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.mixed(x), self.step(x), self.output_gate(x)

    def mix(
        self, projected: tuple[Tensor, ...], memory: MatrixLayerMemory, reading: Reading
    ) -> tuple[Tensor, MatrixLayerMemory]:
        config = self.config
        weights = memory.weights
        mixed, step, gate = (t.to(weights.dtype) for t in projected)
        mixed, carried = reading.convolve(mixed, self.convolution, memory.inputs)
        q, k, v = F.silu(mixed + self.convolution_bias).split(config.widths, -1)
        share = config.n_heads // config.n_groups
        q, k = (t.unflatten(-1, (config.n_groups, -1)).transpose(1, 2) for t in (q, k))
        q, k = (t.repeat_interleave(share, 1) for t in (q, k))
        v = v.unflatten(-1, (config.n_heads, -1)).transpose(1, 2)
        (step,) = reading.written(F.softplus(step + self.dt_bias))
        step = traced_contiguous(step).transpose(1, 2)
        log_decay = -finite_exp(self.A_log, step.dtype)[:, None] * step
        q, k, written = reading.rounded(projected[0], q, k, step.unsqueeze(-1) * v)
        y, weights = generalized_delta_rule(
            q, k, written, weights, log_decay=log_decay, **reading.rule()
        )
        y = y.to(weights.dtype) + self.D[:, None, None] * v
        y = y.transpose(1, 2).flatten(2) * F.silu(gate)
        y = y.unflatten(-1, (config.n_groups, -1))
        y = F.rms_norm(y, y.shape[-1:], eps=EPSILON).flatten(2) * self.norm_weight
        return y, MatrixLayerMemory(weights, carried)


@known()
class Mamba2Layer(MatrixLayer):
    """Token mixing with a norm and a residual; and a feed-forward sub-layer if ``d_ff`` is set."""

    mixer_type = Mamba2Mixer
