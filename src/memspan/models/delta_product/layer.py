"""One layer of DeltaProduct (Siems et al. 2025, arXiv 2502.10297, section 3).

It changes one thing in Gated DeltaNet: a token takes several steps of the delta rule, then reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    softplus_decay,
    step_biases,
)
from memspan.ops.fast_weights.rules import delta_rule

if TYPE_CHECKING:
    from memspan.models.delta_product.config import DeltaProductConfig


@known("config")
class DeltaProductRule(DeltaMixer):
    """One layer's token mixing, without a residual or a norm before it.

    With a decay ``a`` per head as in Gated DeltaNet (1 without ``decay``), and ``k_j``, ``v_j`` and
    ``b_j`` for each of ``n`` steps (eq. 3 and 4)::

        S_0 = a S        S_j = S_(j-1) + b_j k_j (x) (v_j - k_j S_(j-1))        S' = S_n        y = q S'

    Queries, keys and values are as in :class:`DeltaMixer`; the output is ``RMSNorm(y) * SiLU(gate)``.

    Args:
        config: its width, heads, steps and convolution; the rest of a model's is not looked at.
    """

    options = "DeltaProductConfig"

    def __init__(self, config: DeltaProductConfig) -> None:
        super().__init__(config)
        d = config.d_model
        values = config.n_heads * config.value_width
        self.beta = nn.Linear(d, config.n_householder * config.n_heads, bias=False)
        if config.decay:
            self.step = nn.Linear(d, config.n_heads, bias=False)
            self.A_log = decay_rates(config.n_heads)
            self.dt_bias = step_biases(config.n_heads)
        self.output_gate = nn.Linear(d, values, bias=False)
        self.norm = nn.RMSNorm(config.value_width, eps=EPSILON)
        self.output = nn.Linear(values, d, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        projected = self.mixed(x), self.beta(x), self.output_gate(x)
        return (*projected, self.step(x)) if self.config.decay else projected

    def mix(
        self, projected: tuple[Tensor, ...], memory: MatrixLayerMemory, reading: Reading
    ) -> tuple[Tensor, MatrixLayerMemory]:
        n = self.config.n_householder
        weights = memory.weights
        mixed, beta, gate, *steps = (t.to(weights.dtype) for t in projected)
        q, k, v, carried = self.heads(mixed, memory.inputs, reading)
        (beta,) = reading.written(self.strength(beta))
        beta = beta.unflatten(-1, (n, -1)).permute(0, 3, 1, 2).flatten(2)
        k, v = (self.in_turn(t) for t in (k, v))
        rule = reading.rule()
        if rule["starts"] is not None:
            rule["starts"] = first_of(n, rule["starts"].unsqueeze(1)).squeeze(1)
        if steps:
            log_decay = softplus_decay(steps[0], self.A_log, self.dt_bias, reading)
            rule["log_decay"] = first_of(n, log_decay)
        q, k, v = reading.rounded(projected[0], q, k, v)
        y, weights = delta_rule(q.repeat_interleave(n, 2), k, v, beta, weights, **rule)
        y = y[:, :, n - 1 :: n].transpose(1, 2).to(weights.dtype)
        y = self.norm(y) * F.silu(gate.unflatten(-1, y.shape[2:]))
        return y, MatrixLayerMemory(weights, carried)

    def in_turn(self, x: Tensor) -> Tensor:
        """``[B, n H, T, K]``, step by step, to ``[B, H, T n, K]``, token by token."""
        return x.unflatten(1, (-1, self.config.n_heads)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def first_of(n: int, x: Tensor) -> Tensor:
    """``x [..., T]`` at the first of a token's ``n`` steps, zero at the others: ``[..., T n]``."""
    return F.pad(x.unsqueeze(-1), (0, n - 1)).flatten(-2)


@known()
class DeltaProductLayer(MatrixLayer):
    """Token mixing and a feed-forward sub-layer, each after a norm and with a residual."""

    mixer_type = DeltaProductRule
