"""One layer of Kimi Delta Attention (Kimi Linear, Kimi Team 2025, arXiv 2510.26692, section 3).

It changes one thing in Gated DeltaNet: each channel of a key has a decay of its own. Two products are
of low rank, and the output's gate is a sigmoid.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from memspan.models.known import known
from memspan.models.matrix.mixer import (
    EPSILON,
    DeltaMixer,
    LowRank,
    MatrixLayer,
    MatrixLayerMemory,
    Reading,
    decay_rates,
    softplus_decay,
    step_biases,
)
from memspan.ops.fast_weights.rules import delta_rule

if TYPE_CHECKING:
    from memspan.models.kda.config import KDAConfig


@known("config")
class KimiDeltaAttention(DeltaMixer):
    """One layer's token mixing, without a residual or a norm.

    With a decay ``a [K]`` and a strength ``b`` per head (eq. 1)::

        S' = diag(a) S + b k (x) (v - k diag(a) S)        y = q S'
        a = exp(-exp(A_log) softplus(W_up W_down x + dt_bias))        b = sigmoid(w x)

    Queries, keys and values are as in :class:`DeltaMixer`. The output is ``RMSNorm(y) * sigmoid(W_up
    W_down x + bias)``; each ``W_down`` has as many rows as a value.

    Args:
        config: its width, heads and convolution; what concerns other parts of a model, such as
            ``n_layers``, is not looked at.
    """

    options = "KDAConfig"

    def __init__(self, config: KDAConfig) -> None:
        super().__init__(config)
        d = config.d_model
        rank = config.value_width
        _, keys, values = config.widths
        self.beta = nn.Linear(d, config.n_heads, bias=False)
        self.step = LowRank(d, rank, keys)
        self.A_log = decay_rates(config.n_heads)
        self.dt_bias = step_biases(keys)
        self.output_gate = LowRank(d, rank, values, bias=True)
        self.norm = nn.RMSNorm(rank, eps=EPSILON)
        self.output = nn.Linear(values, d, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.mixed(x), self.beta(x), self.step(x), self.output_gate(x)

    def mix(
        self, projected: tuple[Tensor, ...], memory: MatrixLayerMemory, reading: Reading
    ) -> tuple[Tensor, MatrixLayerMemory]:
        weights = memory.weights
        mixed, beta, step, gate = (t.to(weights.dtype) for t in projected)
        q, k, v, carried = self.heads(mixed, memory.inputs, reading)
        (beta,) = reading.written(self.strength(beta))
        log_decay = softplus_decay(step, self.A_log, self.dt_bias, reading)
        q, k, v = reading.rounded(projected[0], q, k, v)
        y, weights = delta_rule(
            q, k, v, beta.transpose(1, 2), weights, log_decay=log_decay, **reading.rule()
        )
        y = y.transpose(1, 2).to(weights.dtype)
        y = self.norm(y) * gate.unflatten(-1, y.shape[2:]).sigmoid()
        return y, MatrixLayerMemory(weights, carried)


@known()
class KDALayer(MatrixLayer):
    """Token mixing and a feed-forward sub-layer, each after a norm and with a residual.

    Args:
        config: as of :class:`KimiDeltaAttention`, and the feed-forward's width and dropout.
    """

    mixer_type = KimiDeltaAttention
