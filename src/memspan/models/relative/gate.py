"""The gate in place of a residual sum (GTrXL: Parisotto et al. 2019, arXiv 1910.06764)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from memspan.nn import known

FIRST_BIAS = 2.0
"""``b`` at the start: ``z`` is then about 0.12, and a layer nearly the identity."""


@known()
class GRUGate(nn.Module):
    """A GRU whose state is the residual stream ``x`` and whose input is ``y = relu(branch)``, a
    sub-layer's output (section 3.2, "Gated-Recurrent-Unit-type gating"):

    ``r = sigmoid(W_r y + U_r x)``, ``z = sigmoid(W_z y + U_z x - b)``,
    ``h = tanh(W_g y + U_g (r * x))``, ``x' = (1 - z) * x + z * h``
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        # W_r, W_z and W_g; U_r and U_z; U_g.
        self.of_branch = nn.Linear(d_model, 3 * d_model, bias=False)
        self.of_stream = nn.Linear(d_model, 2 * d_model, bias=False)
        self.of_reset_stream = nn.Linear(d_model, d_model, bias=False)
        self.bias = nn.Parameter(torch.full((d_model,), FIRST_BIAS))

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        """``x'`` of the stream ``x`` and a sub-layer's output, all ``[..., D]``."""
        reset, update, candidate = self.of_branch(branch.relu()).chunk(3, -1)
        own_reset, own_update = self.of_stream(x).chunk(2, -1)
        r = (reset + own_reset).sigmoid()
        z = (update + own_update - self.bias).sigmoid()
        return x + z * ((candidate + self.of_reset_stream(r * x)).tanh() - x)  # type: ignore[no-any-return]

    def initialise(self) -> None:
        """Begin near the identity."""
        nn.init.constant_(self.bias, FIRST_BIAS)
