"""Options of the LSTM baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from memspan.calls import Options
from memspan.checks import at_least, check_types, probability
from memspan.models.options import BackboneConfig

if TYPE_CHECKING:
    from memspan.models.lstm.model import LSTM


@dataclass(frozen=True)
class LSTMConfig(Options, BackboneConfig):
    """LSTM backbone (Hochreiter and Schmidhuber 1997), PyTorch's own: a baseline."""

    n_layers: int = 2
    """Number of layers."""
    d_model: int = 128
    """Width of the input, the states and the output."""
    initialisation: Literal["scaled", "papers"] = "scaled"
    """Initial weights. scaled: by their width. papers: N(0, 0.02^2)."""
    dropout: float = 0.0
    """Dropout probability on embeddings and on the output of each layer."""

    def __post_init__(self) -> None:
        check_types(self)
        at_least(1, self, "n_layers", "d_model")
        probability(self, "dropout")

    def build(self) -> LSTM:
        from memspan.models.lstm.model import LSTM

        return LSTM(self)

    def least_parameters(self) -> int:
        return 8 * self.n_layers * self.d_model**2
