"""One layer of Gated DeltaNet 2, in the form that flash-linear-attention 0.6.0 has.

It changes one thing in Kimi Delta Attention: erasing and writing have gates of their own, for each
channel of a key and of a value, in place of one strength per head for both.
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
from memspan.ops.delta_rules.rule import generalized_delta_rule

if TYPE_CHECKING:
    from memspan.models.gated_delta_net_2.config import GatedDeltaNet2Config


@known("config")
class GatedDeltaRule2(DeltaMixer):
    """One layer's token mixing, without a residual or a norm before it.

    With a decay ``a [K]``, an erase gate ``b [K]`` and a write gate ``w [V]`` per head::

        S' = diag(a) S + k (x) (w * v - (b * k) diag(a) S)        y = q S'
        a = exp(-exp(A_log) softplus(W_up W_down x + dt_bias))
        b = sigmoid(W_b x)        w = sigmoid(W_w x)

    Queries, keys and values are as in :class:`DeltaMixer`. The output is ``RMSNorm(y) * sigmoid(W_up
    W_down x + bias)``; each ``W_down`` has as many rows as a value.

    Args:
        config: its width, heads and convolution; the rest of a model's is not looked at.
    """

    options = "GatedDeltaNet2Config"

    def __init__(self, config: GatedDeltaNet2Config) -> None:
        super().__init__(config)
        d = config.d_model
        rank = config.value_width
        _, keys, values = config.widths
        self.erase = nn.Linear(d, keys, bias=False)
        self.write = nn.Linear(d, values, bias=False)
        self.step = LowRank(d, rank, keys)
        self.A_log = decay_rates(config.n_heads)
        self.dt_bias = step_biases(keys)
        self.output_gate = LowRank(d, rank, values, bias=True)
        self.norm = nn.RMSNorm(rank, eps=EPSILON)
        self.output = nn.Linear(values, d, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.mixed(x), self.erase(x), self.write(x), self.step(x), self.output_gate(x)

    def mix(
        self, projected: tuple[Tensor, ...], memory: MatrixLayerMemory, reading: Reading
    ) -> tuple[Tensor, MatrixLayerMemory]:
        weights = memory.weights
        mixed, erase, write, step, gate = (t.to(weights.dtype) for t in projected)
        q, k, v, carried = self.heads(mixed, memory.inputs, reading)
        gates = reading.written(self.strength(erase), write.sigmoid())
        erase, write = (t.unflatten(-1, (self.config.n_heads, -1)).transpose(1, 2) for t in gates)
        log_decay = softplus_decay(step, self.A_log, self.dt_bias, reading)
        lookup = erase * k * log_decay.exp()
        q, k, v, lookup = reading.rounded(projected[0], q, k, write * v, lookup)
        y, weights = generalized_delta_rule(
            q,
            k,
            v,
            weights,
            log_decay=log_decay,
            erase=k,
            lookup=lookup,
            **reading.rule(),
        )
        y = y.transpose(1, 2).to(weights.dtype)
        y = self.norm(y) * gate.unflatten(-1, y.shape[2:]).sigmoid()
        return y, MatrixLayerMemory(weights, carried)


@known()
class GatedDeltaNet2Layer(MatrixLayer):
    """Token mixing and a feed-forward sub-layer, each after a norm and with a residual."""

    mixer_type = GatedDeltaRule2
