"""Options of the Fast Weights transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from memspan.checks import at_least, probability
from memspan.errors import MemspanError
from memspan.models.options import HeadsConfig, check_sinusoids

if TYPE_CHECKING:
    from memspan.models.fast_weights.model import FastWeights


@dataclass(frozen=True)
class FastWeightsConfig(HeadsConfig):
    """Fast Weights backbone (Schlag, Irie, Schmidhuber 2021, arXiv 2102.11174)."""

    n_heads: int = 4
    """Heads per layer; each has a fast weight matrix."""
    rule: Literal["delta", "sum", "outer-product"] = "delta"
    """Rule for writing a token's value. delta: it replaces the value stored under its key. sum: it is
    added. outer-product: the rule of 1991, f(W + a b), computed token by token."""
    outer_activation: Literal["tanh", "identity"] = "tanh"
    """Function f of the outer-product rule."""
    feature_map: Literal["dpfp", "elu", "favor", "softmax", "identity"] = "dpfp"
    """Map from keys and queries to features: dpfp has 2 * d_head * nu of them, favor twice its random
    projections, the others d_head. softmax is over a key's own entries, identity changes nothing."""
    nu: int = 1
    """dpfp: number of rolls, 1 to 2 * d_head - 1."""
    favor_features: int | None = None
    """favor: number of random projections m (None: d_head)."""
    normalisation: Literal["sum", "attention", "none"] = "sum"
    """sum: divide features by their sum. attention: divide outputs by z . q, where z is the sum of all
    keys. none: neither."""
    epsilon: float = 1e-6
    """Added to the denominator of normalisation."""
    norm: Literal["pre", "post", "feed-forward"] = "pre"
    """Layer normalisation before each sub-layer (pre), after each residual sum (post), or before the
    feed-forward sub-layer only, so that attention reads the residual stream as it is."""
    positions: Literal["none", "sinusoidal"] = "none"
    """Sinusoids of the absolute position, added to the input. The update rules work without
    them."""
    chunk_size: int = 32
    """Tokens that are computed at once; results do not depend on it."""
    recompute: bool = False
    """Train with less memory in about a third more time, by recomputing most of the recurrence in the
    backward pass."""
    final_norm: bool = True
    """Normalise the last layer's output (post-norm already ends in one)."""
    initialisation: Literal["scaled", "papers"] = "scaled"
    """Initial weights. scaled: each matrix by its width and its role. papers: N(0, 0.02^2) for all,
    which suits widths of about 500 to 1,000."""
    dropout: float = 0.0
    """Dropout probability on embeddings and sub-layer outputs."""

    same_function: ClassVar[frozenset[str]] = HeadsConfig.same_function | {
        "favor_features",
        "chunk_size",
        "recompute",
        "final_norm",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "chunk_size", "favor_features")
        at_least(0, self, "epsilon")
        probability(self, "dropout")
        if self.positions == "sinusoidal":
            check_sinusoids(self, "none")
        if not 1 <= self.nu <= 2 * self.head_width - 1:
            raise MemspanError(
                f"nu must lie in 1 .. {2 * self.head_width - 1}, twice the head's width minus one, "
                f"not {self.nu}: more rolls would repeat the same products"
            )
        if self.feature_map == "identity" and self.normalisation != "none":
            raise MemspanError(
                f"normalisation {self.normalisation} divides by a sum of features, which may be "
                "zero or negative with feature_map identity: use normalisation none, or another map"
            )
        maps = self.feature_map != "identity" or self.normalisation != "none"
        if self.rule == "outer-product" and (
            maps or self.recompute or self.head_width * self.n_heads != self.d_model
        ):
            raise MemspanError(
                "the outer-product rule has no feature map and no normalisation, reads with the input "
                "itself and has nothing to recompute: use feature_map identity and normalisation none "
                "with it, and neither d_head nor recompute, or rule delta or sum"
            )
        others = {
            "outer_activation": ("rule", "outer-product", "tanh"),
            "nu": ("feature_map", "dpfp", 1),
            "favor_features": ("feature_map", "favor", None),
        }
        for name, (option, owner, default) in others.items():
            chosen = getattr(self, option)
            if chosen != owner and getattr(self, name) != default:
                raise MemspanError(
                    f"{name} belongs to {option} {owner}, not {chosen}: drop it, or change {option}"
                )

    @property
    def n_projections(self) -> int:
        """Random projections m of feature_map favor."""
        return self.head_width if self.favor_features is None else self.favor_features

    @property
    def feature_width(self) -> int:
        """Features of one key."""
        if self.feature_map == "dpfp":
            return 2 * self.head_width * self.nu
        return 2 * self.n_projections if self.feature_map == "favor" else self.head_width

    def build(self) -> FastWeights:
        from memspan.models.fast_weights.model import FastWeights

        return FastWeights(self)
