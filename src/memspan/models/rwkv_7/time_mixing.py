"""RWKV-7's token mixing (Peng et al. 2025, arXiv 2503.14456, section 4.1).

Its rule is the general one: what is erased, and how much, has vectors of its own. Each token is read
beside the one before it, and later layers see the first one's values.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memspan.errors import MemspanError
from memspan.models.matrix.mixer import LowRank, MatrixLayerMemory, MatrixMixer, Reading
from memspan.ops.delta_rules.rule import generalized_delta_rule
from memspan.trees import check_layer

if TYPE_CHECKING:
    from memspan.models.rwkv_7.config import RWKV7Config
    from memspan.models.segments import Documents

SHIFTS = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}
"""By what is made of it, how fast the share of the token before falls along the channels at first."""


class RWKV7TimeMixing(MatrixMixer):
    """One layer's token mixing, without a residual or a norm before it.

    With ``x_n = x + (previous x - x) * shift_n`` for each ``n``, ``LoRA(x) = W_up f(W_down x)``, and in
    each head a decay ``w``, a rate ``a`` and a removal key ``c``, all ``[K]``::

        S' = diag(w) S - (a * c) (x) (c S) + k (x) v        y = r S'
        w = exp(-exp(-1/2) sigmoid(w_0 + LoRA(x_w)))        a = sigmoid(a_0 + LoRA(x_a))
        c = unit(k' * xi)        k = k' * (1 + (a - 1) * alpha)        k' = W_k x_k        r = W_r x_r
        v = v' + sigmoid(v_0 + LoRA(x_v)) (v'_first - v')        v' = W_v x_v

    The output is ``(LayerNorm(y) + (r . (rho * k)) v) * LoRA(x_g)``, with a norm for each head.

    Args:
        config: its width, heads and ranks; the rest of a model's is not looked at.
        layer: its place in a stack of ``n_layers``, which initial values depend on. From 1 on it needs
            the first layer's values.
    """

    options = "RWKV7Config"

    def __init__(self, config: RWKV7Config, layer: int = 0) -> None:
        super().__init__(config)
        d = config.d_model
        inner = config.n_heads * config.head_width
        left = 1 - layer / config.n_layers
        ramp = torch.arange(d) / d
        at = torch.linspace(-0.5, 0.5, inner)
        in_head = torch.linspace(-1, 1, config.head_width).repeat(config.n_heads)
        in_head = in_head * in_head.abs()
        self.shift = nn.ParameterDict({n: 1 - ramp ** (p * left) for n, p in SHIFTS.items()})
        self.query = nn.Linear(d, inner, bias=False)
        self.key = nn.Linear(d, inner, bias=False)
        self.value = nn.Linear(d, inner, bias=False)
        self.decay = LowRank(d, config.rank("decay"), inner)
        depth = 1 + (layer / max(1, config.n_layers - 1)) ** 0.3
        self.decay_base = nn.Parameter(6 * (at + 0.5) ** depth - 5.5 + 2.5 * in_head)
        self.rate = LowRank(d, config.rank("rate"), inner)
        self.rate_base = nn.Parameter(0.3 * in_head + 0.4 * at - 0.19)
        self.mixes_values = layer > 0
        if self.mixes_values:
            self.value_mix = LowRank(d, config.rank("value"), inner)
            self.value_base = nn.Parameter(0.73 - 0.4 * at)
        self.gate = LowRank(d, config.rank("gate"), inner)
        self.removal = nn.Parameter(0.71 - 0.1 * at)
        self.replacement = nn.Parameter(torch.full([inner], 1.02))
        self.bonus = nn.Parameter(torch.full([inner], -0.04))
        self.norm_weight = nn.Parameter(torch.full([inner], ((layer + 1) / config.n_layers) ** 0.7))
        self.norm_bias = nn.Parameter(torch.zeros(inner))
        self.output = nn.Linear(inner, d, bias=False)

    def initial_memory(self, batch_size: int) -> MatrixLayerMemory:
        sizes = self.config.row_sizes() | {"inputs": (1, self.config.d_model)}
        return MatrixLayerMemory.zeros(next(self.parameters()), batch_size, sizes)

    def forward(
        self,
        x: Tensor,
        memory: MatrixLayerMemory | None = None,
        implementation: str | None = None,
        documents: Documents | None = None,
        first_values: Tensor | None = None,
        with_values: bool = False,
    ) -> Any:
        """See :meth:`MatrixMixer.forward`.

        Args:
            first_values: ``v'`` of the first layer, ``[B, T, H K]``.
            with_values: return it, too, third.

        Raises:
            MemspanError: also where ``first_values`` are missing.
        """
        memory = check_layer(self, x, self.config.d_model, memory)
        reading = self.reading(implementation, documents)
        before, carried = reading.shift(x, memory.inputs)
        of = {name: torch.lerp(x, before, shift) for name, shift in self.shift.items()}
        v = self.values(of["v"], first_values)
        projected = [
            self.query(of["r"]),
            self.key(of["k"]),
            self.decay.up(self.decay.down(of["w"]).tanh()),
            self.rate(of["a"]),
            self.gate.up(self.gate.down(of["g"]).sigmoid()),
        ]
        with torch.autocast(x.device.type, enabled=False):
            y, weights = self.apply_rule((*projected, v), memory.weights, reading)
        y = self.output(y.to(x.dtype))
        after = MatrixLayerMemory(weights, carried)
        if not with_values:
            return y, after
        return y, after, first_values if self.mixes_values else v

    def values(self, x: Tensor, first: Tensor | None) -> Tensor:
        """Values ``[B, T, H K]``, into which those of the first layer are mixed."""
        v: Tensor = self.value(x)
        if not self.mixes_values:
            return v
        if first is None:
            raise MemspanError(
                "a layer after the first mixes in the first one's values: pass first_values, which "
                "the first one returns if it is called with with_values"
            )
        share = (self.value_mix(x) + self.value_base).sigmoid()
        return torch.lerp(v, first.to(v.dtype), share.to(v.dtype))

    def apply_rule(
        self, projected: tuple[Tensor, ...], weights: Tensor, reading: Reading
    ) -> tuple[Tensor, Tensor]:
        """Write and read, without autocast: outputs ``[B, T, H K]``, normalised and gated, and the
        matrices after the segment."""
        config = self.config
        r, k, w, a, gate, v = (t.to(weights.dtype) for t in projected)
        log_decay = -math.exp(-0.5) * (w + self.decay_base).sigmoid()
        a = (a + self.rate_base).sigmoid()
        c = k * self.removal
        k = k * (1 + (a - 1) * self.replacement)
        bonus = self.bonus * r * k
        heads = (*reading.written(k, a, log_decay), r, v, c, bonus)
        k, a, log_decay, r, v, c, bonus = (
            t.unflatten(-1, (config.n_heads, -1)).transpose(1, 2) for t in heads
        )
        c = F.normalize(c, dim=-1)
        erase = a * c
        r, k, v, erase, lookup = reading.rounded(projected[0], r, k, v, erase, c)
        y, weights = generalized_delta_rule(
            r, k, v, weights, log_decay=log_decay, erase=erase, lookup=lookup, **reading.rule()
        )
        y = y.to(weights.dtype)
        width = config.head_width
        y = F.layer_norm(y, [width], eps=1e-5 * width).transpose(1, 2).flatten(2)
        y = y * self.norm_weight + self.norm_bias
        y = y + (bonus.sum(-1, keepdim=True) * v).transpose(1, 2).flatten(2)
        return y * gate, weights
