"""One layer of gated linear attention (Yang et al. 2023, arXiv 2312.06635, section 4), or RetNet (Sun
et al. 2023, arXiv 2307.08621).

Linear attention whose matrix decays: a token only adds to it, and nothing is taken away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memspan.models.known import known
from memspan.models.matrix.mixer import (
    EPSILON,
    LowRank,
    MatrixLayer,
    MatrixLayerMemory,
    MatrixMixer,
    Reading,
)
from memspan.ops.delta_rules.rule import generalized_delta_rule

if TYPE_CHECKING:
    from memspan.models.gla.config import GLAConfig


@known("config")
class GatedLinearAttention(MatrixMixer):
    """One layer's token mixing, without a residual or a norm before it.

    With a decay ``a [K]`` per head (eq. 3 and section 4.4)::

        S' = diag(a) S + k (x) v        y = q S' / sqrt(K)        a = sigmoid(W_up W_down x + b)^(1/16)

    With decay ``retention`` ``a = 1 - 2^(-5 - h)`` in head ``h``, counted from 0. The output is
    ``RMSNorm(y) * SiLU(gate)``.

    Differs from the paper: the norm is RMSNorm, not LayerNorm, and the gate has no bias, as in the
    authors' library. Retention does not rotate queries and keys with their positions.

    Args:
        config: its width, heads and decays; the rest of a model's is not looked at.
    """

    options = "GLAConfig"

    def __init__(self, config: GLAConfig) -> None:
        super().__init__(config)
        d = config.d_model
        keys = config.n_heads * config.head_width
        values = config.n_heads * config.value_width
        self.query = nn.Linear(d, keys, bias=False)
        self.key = nn.Linear(d, keys, bias=False)
        self.value = nn.Linear(d, values, bias=False)
        if config.decay == "gated":
            self.decay = LowRank(d, config.decay_rank, keys, bias=True)
        self.output_gate = nn.Linear(d, values, bias=False)
        self.norm = nn.RMSNorm(config.value_width, eps=EPSILON)
        self.output = nn.Linear(values, d, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        projected = self.query(x), self.key(x), self.value(x), self.output_gate(x)
        return (*projected, self.decay(x)) if self.config.decay == "gated" else projected

    def retention(self, like: Tensor) -> Tensor:
        """Logarithms of RetNet's decays, ``[H]``, in the type and on the device of ``like``."""
        heads = torch.arange(self.config.n_heads, dtype=like.dtype, device=like.device)
        return (-torch.exp2(-5 - heads)).log1p()

    def mix(
        self, projected: tuple[Tensor, ...], memory: MatrixLayerMemory, reading: Reading
    ) -> tuple[Tensor, MatrixLayerMemory]:
        config = self.config
        weights = memory.weights
        q, k, v, gate, *logits = (
            t.to(weights.dtype).unflatten(-1, (config.n_heads, -1)) for t in projected
        )
        if logits:
            log_decay = F.logsigmoid(logits[0]) / config.decay_temperature
        else:
            log_decay = self.retention(q).expand(q.shape[:3])
        k, log_decay = reading.written(k, log_decay)
        q, k, v, log_decay = (t.transpose(1, 2) for t in (q, k, v, log_decay))
        q = q * config.head_width**-0.5
        q, k, v = reading.rounded(projected[0], q, k, v)
        y, weights = generalized_delta_rule(q, k, v, weights, log_decay=log_decay, **reading.rule())
        y = self.norm(y.transpose(1, 2).to(weights.dtype)) * F.silu(gate)
        return y, MatrixLayerMemory(weights, memory.inputs)


@known()
class GLALayer(MatrixLayer):
    """Token mixing and a feed-forward sub-layer, each after a norm and with a residual."""

    mixer_type = GatedLinearAttention
