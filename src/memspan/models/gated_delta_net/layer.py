"""One layer of Gated DeltaNet (Yang, Kautz, Hatamizadeh 2024, arXiv 2412.06464).

The rule and the convolution themselves are in :mod:`memspan.ops`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memspan.models.known import known
from memspan.models.matrix.mixer import (
    EPSILON,
    DeltaMixer,
    MatrixLayer,
    MatrixLayerMemory,
    Reading,
    decay_rates,
    finite_exp,
    step_biases,
    traced_contiguous,
)
from memspan.ops.fast_weights.rules import delta_rule

if TYPE_CHECKING:
    from memspan.models.gated_delta_net.config import GatedDeltaNetConfig

PRODUCTS = ("query", "key", "value", "output_gate", "beta", "step")
"""Products of the input, in the order in which a reader has their weights as one matrix."""


@known("config")
class GatedDeltaRule(DeltaMixer):
    """One layer's token mixing (section 3.4 and figure 1 of the paper), without a residual or a norm.

    ::

        S' = a S + b k (x) (v - k a S)    y = q S'    a = exp(-exp(A_log) softplus(step + dt_bias))

    with ``b = sigmoid(beta)``, one ``a`` and ``b`` per head. Queries, keys and values pass a
    convolution and SiLU, and queries and keys then have length 1; the output is ``RMSNorm(y)
    * SiLU(gate)``.

    Args:
        config: its width, heads and convolution; what concerns other parts of a model, such as
            ``n_layers``, is not looked at.
    """

    options = "GatedDeltaNetConfig"

    def __init__(self, config: GatedDeltaNetConfig) -> None:
        super().__init__(config)
        d = config.d_model
        heads = config.value_heads
        values = config.widths[-1]
        self.beta = nn.Linear(d, heads, bias=False)
        self.step = nn.Linear(d, heads, bias=False)
        self.A_log = decay_rates(heads)
        self.dt_bias = step_biases(heads)
        self.output_gate = nn.Linear(d, values, bias=False)
        self.norm = nn.RMSNorm(config.value_width, eps=EPSILON)
        self.output = nn.Linear(values, d, bias=False)

    def rate(self, dtype: torch.dtype) -> Tensor:
        """``exp(A_log)``, ``[H]``."""
        return finite_exp(self.A_log, dtype)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.mixed(x), self.beta(x), self.step(x), self.output_gate(x)

    def mix(
        self, projected: tuple[Tensor, ...], memory: MatrixLayerMemory, reading: Reading
    ) -> tuple[Tensor, MatrixLayerMemory]:
        weights = memory.weights
        mixed, beta, step, gate = projected
        if reading.implementation != "fla":
            # fla's kernels add up in float32 themselves, and take what they multiply as it is.
            mixed = mixed.to(weights.dtype)
            beta = beta.to(weights.dtype)
        step = step.to(weights.dtype)
        gate = gate.to(weights.dtype)
        q, k, v, carried = self.heads(mixed, memory.inputs, reading)
        beta = self.strength(beta)
        log_decay = -self.rate(step.dtype) * F.softplus(step + self.dt_bias)
        beta, log_decay = reading.written(beta, log_decay)
        y, weights = delta_rule(
            q,
            k,
            v,
            beta.transpose(1, 2),
            weights,
            log_decay=traced_contiguous(log_decay).transpose(1, 2),
            **reading.rule(),
        )
        y = y.transpose(1, 2).to(weights.dtype)
        y = self.norm(y) * F.silu(gate.unflatten(-1, y.shape[2:]))
        return y, MatrixLayerMemory(weights, carried)


@known()
class GatedDeltaNetLayer(MatrixLayer):
    """Token mixing and a feed-forward sub-layer, each after a norm and with a residual.

    Args:
        config: as of :class:`GatedDeltaRule`, and the feed-forward's width and dropout.
    """

    mixer_type = GatedDeltaRule
    mixer: GatedDeltaRule
