"""Options of the architectures with a matrix per head, such as Gated DeltaNet. No torch here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from memspan.checks import at_least, probability
from memspan.models.options import HeadsConfig, layer_parameters


@dataclass(frozen=True)
class MatrixConfig(HeadsConfig):
    """The options that these architectures share, before those of their own."""

    chunk_size: int = 32
    """Tokens that are computed at once if the C code for chunks cannot run; results do not depend
    on it."""
    recompute: bool = False
    """Train with less memory in more time, by recomputing most of the recurrence in the backward
    pass."""
    initialisation: Literal["scaled", "papers"] = "scaled"
    """Initial weights. scaled: each matrix by its width and its role. papers: N(0, 0.02^2) for all."""
    dropout: float = 0.0
    """Dropout probability on embeddings and sub-layer outputs."""

    same_function: ClassVar[frozenset[str]] = HeadsConfig.same_function | {
        "chunk_size",
        "recompute",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "chunk_size")
        probability(self, "dropout")

    @property
    def matrices(self) -> tuple[int, int, int]:
        """Matrices of a layer, and rows and columns of each: ``H, K, V``."""
        return self.n_heads, self.head_width, self.head_width

    @property
    def carried_inputs(self) -> tuple[int, int]:
        """Inputs that a layer carries to the next segment, and numbers in each: ``W - 1, C``."""
        return 0, 0

    def row_sizes(self) -> dict[str, tuple[int, ...]]:
        """The sizes of one row of a layer's memory."""
        return {"weights": self.matrices, "inputs": self.carried_inputs}


@dataclass(frozen=True)
class ConvolvedConfig(MatrixConfig, ABC):
    """Options of a rule after a short convolution."""

    n_heads: int = 4
    """Heads per layer; each has a matrix."""
    convolution: int = 4
    """Tokens that the convolutions of queries, keys and values span, including the current one."""

    same_function: ClassVar[frozenset[str]] = MatrixConfig.same_function | {"convolution"}

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "convolution")

    @property
    @abstractmethod
    def widths(self) -> tuple[int, int, int]:
        """Widths of all queries, keys and values together."""

    @property
    def carried_inputs(self) -> tuple[int, int]:
        return self.convolution - 1, sum(self.widths)

    def least_parameters(self) -> int:
        return self.n_layers * layer_parameters(self.d_model, sum(self.widths) // 2, self.d_ff)


@dataclass(frozen=True)
class DeltaConfig(ConvolvedConfig):
    """Options of a delta rule after a short convolution."""

    d_head: int | None = None
    """Width of a query or key (None: d_model / n_heads)."""
    d_value: int | None = None
    """Width of a value (None: that of a key)."""
    negative_eigenvalues: bool = False
    """Let beta lie in (0, 2), not in (0, 1): a write may reverse the sign of its key's old value
    (Grazzi et al. 2024, arXiv 2411.12537)."""

    same_function: ClassVar[frozenset[str]] = ConvolvedConfig.same_function | {"d_value"}

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "d_value")

    @property
    def value_heads(self) -> int:
        """Heads of values, H."""
        return self.n_heads

    @property
    def value_width(self) -> int:
        """Width of a value, V."""
        return self.head_width if self.d_value is None else self.d_value

    @property
    def widths(self) -> tuple[int, int, int]:
        """Widths of all queries, keys and values together."""
        keys = self.n_heads * self.head_width
        return keys, keys, self.value_heads * self.value_width

    @property
    def matrices(self) -> tuple[int, int, int]:
        return self.value_heads, self.head_width, self.value_width
