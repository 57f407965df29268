"""Options of language models, and what every architecture's options answer. No torch here."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, runtime_checkable

from memspan.calls import Options
from memspan.checks import at_least, check_types, probability
from memspan.errors import MemspanError

if TYPE_CHECKING:
    from memspan.models.protocol import Backbone


@dataclass(frozen=True)
class NoOptions:
    """For an architecture that has nothing to change after training."""


@dataclass(frozen=True)
class MemoryLength:
    """Memory sizes of architectures with one slot per token."""

    memory_length: int | None = None
    """Slots of memory per layer, one per token (None: as in training)."""

    def __post_init__(self) -> None:
        check_types(self)
        at_least(0, self, "memory_length")


@dataclass(frozen=True)
class Plot:
    """A picture of an architecture's own statistics, drawn from a run's metrics."""

    file: str
    """Its name in the run folder."""
    ylabel: str
    lines: dict[str, str]
    """Label to the name of a statistic (see ``BackboneOutput.statistics``), the mean over layers."""


@runtime_checkable
class BackboneConfig(Protocol):
    """Base class of an architecture's options: its properties are all that other code needs to know.

    An architecture's config is a frozen dataclass that inherits from this. Its fields are the flags
    ``--model.*``; the string under a field is the flag's help.
    """

    @property
    def n_layers(self) -> int:
        """Number of layers, L."""
        ...

    @property
    def d_model(self) -> int:
        """Width of the vectors that the backbone reads and returns, D."""
        ...

    @property
    def initialisation(self) -> Literal["scaled", "papers"]:
        """The way weights are initialised, see :mod:`memspan.models.initialisation`: ``scaled``
        unless it is an option."""
        return "scaled"

    def build(self) -> Backbone[Any]:
        """The backbone with these options. Imports torch, which the options themselves do not need."""
        ...

    def least_parameters(self) -> int:
        """A lower bound on the number of the backbone's parameters, computed without making them: 0
        unless it is overridden."""
        return 0

    memory_options: ClassVar[type] = NoOptions
    """Dataclass of the options of ``Backbone.initial_memory`` that evaluation may change. Each field
    has the name of the option that it replaces; None stands for that option's value."""
    reader_options: ClassVar[type] = NoOptions
    """Dataclass of the options of ``Backbone.reader`` that evaluation and generation may change."""
    plots: ClassVar[tuple[Plot, ...]] = ()
    """Pictures to draw beside the loss."""
    has_auxiliary_parameters: ClassVar[bool] = False
    """True if an auxiliary loss may have parameters of its own, with a learning rate of their own."""
    reads_in_blocks: ClassVar[bool] = False
    """True if a text is read in blocks, between which the architecture carries a memory itself."""
    starts_from: ClassVar[str] = "a run of the same architecture"
    """The runs whose weights it can begin with, in words; see ``Backbone.taken_from``."""
    bfloat16_tokens: ClassVar[bool] = False
    """True if single tokens are read fast in bfloat16 on every CPU."""
    same_function: ClassVar[frozenset[str]] = frozenset(
        {"initialisation", "dropout", "attention_dropout"}
    )
    """Options with which a trained model of the same weights computes the same from tokens and a
    memory: those of training and of the first memory, and those that the weights show. A model's
    fingerprint leaves them out."""

    def for_segments(self, segment_length: int) -> Self:
        """These options with all sizes set that depend on the longest segment in training."""
        return self

    def writing_options(self, segment_length: int) -> dict[str, Any]:
        """Options of the reader where tokens are written, unless others are given; ``segment_length``:
        in training."""
        return {}

    @property
    def longest_segment(self) -> int | None:
        """The longest segment that a model with these options can read (None: any)."""
        return None


def check_parts(vocab_size: object, backbone: object, embedding: object) -> None:
    """Raise :class:`MemspanError` for what a language model cannot be made of."""
    if type(vocab_size) is not int or vocab_size < 1:
        raise MemspanError(f"vocab_size must be an integer of at least 1, not {vocab_size!r}")
    # A class also has the names of its fields.
    if isinstance(backbone, type) or not isinstance(backbone, BackboneConfig):
        raise MemspanError(
            "the backbone must be a config, such as TransformerXLConfig(), not "
            f"{reprlib.repr(backbone)}"
        )
    if not isinstance(embedding, EmbeddingConfig):
        raise MemspanError(
            f"the embedding must be EmbeddingConfig(), not {reprlib.repr(embedding)}"
        )


@dataclass(frozen=True)
class HeadsConfig(Options, BackboneConfig):
    """Options of a stack of layers with heads, which come first in each such architecture's."""

    n_layers: int = 4
    """Number of layers."""
    d_model: int = 128
    """Width of the residual stream."""
    n_heads: int = 4
    """Attention heads per layer."""
    d_head: int | None = None
    """Width of one head (None: d_model / n_heads)."""
    d_ff: int = 512
    """Inner width of the feed-forward sub-layer."""
    activation: Literal["relu", "gelu"] = "relu"
    """Non-linearity of the feed-forward sub-layer."""

    same_function: ClassVar[frozenset[str]] = BackboneConfig.same_function | {"d_head"}
    least_d_ff: ClassVar[int] = 1
    """0 where a layer may do without a feed-forward sub-layer."""

    def __post_init__(self) -> None:
        check_types(self)
        at_least(1, self, "n_layers", "d_model", "n_heads", "d_head")
        at_least(self.least_d_ff, self, "d_ff")
        if self.d_head is None and self.d_model % self.n_heads:
            raise MemspanError(
                f"d_model {self.d_model} is not divisible by n_heads {self.n_heads}: "
                "change one of them, or set d_head"
            )

    @property
    def head_width(self) -> int:
        """Width of one head, K."""
        return self.d_model // self.n_heads if self.d_head is None else self.d_head

    @property
    def table_rows(self) -> int:
        """Rows of a layer's learned position tables."""
        return 0

    def least_parameters(self) -> int:
        inner = self.n_heads * self.head_width
        return self.n_layers * layer_parameters(self.d_model, inner, self.d_ff, self.table_rows)


def check_sinusoids(config: BackboneConfig, instead: str) -> None:
    """Refuse a width that sinusoids cannot fill; ``instead``: positions that can be used."""
    if config.d_model % 2:
        raise MemspanError(
            f"sinusoidal positions need an even d_model, not {config.d_model}: "
            f"change it, or use positions {instead}"
        )


def layer_parameters(d_model: int, inner: int, d_ff: int, table_rows: int = 0) -> int:
    """At least the parameters of a layer: queries, outputs, feed-forward, position table.

    ``inner``: width of all heads together.
    """
    return 2 * d_model * (inner + d_ff) + table_rows * inner


@dataclass(frozen=True)
class EmbeddingConfig(Options):
    """Token embeddings and output head."""

    tie: bool = True
    """Use the embedding table as the output weights."""
    scale: bool = True
    """Multiply embeddings by sqrt(d_model)."""
    d_embed: int | None = None
    """Width of the embedding tables before projection (None: d_model)."""
    cutoffs: tuple[int, ...] = ()
    """Adaptive input and softmax: ids where a new frequency cluster starts (empty: no clusters)."""
    div_val: int = 1
    """Adaptive input and softmax: each further cluster's width is divided by this."""
    tie_projections: Literal["none", "all-but-first", "all"] = "all-but-first"
    """Clusters that use the embedding's projections for the output, too."""
    output_dropout: float = 0.0
    """Dropout probability on the last hidden state, before the output head, as in the Transformer-XL
    authors' code."""

    same_function: ClassVar[frozenset[str]] = frozenset(
        {"tie", "d_embed", "div_val", "tie_projections", "output_dropout"}
    )
    """As :attr:`BackboneConfig.same_function`."""

    def __post_init__(self) -> None:
        check_types(self)
        probability(self, "output_dropout")
        at_least(1, self, "div_val", "d_embed")
        if list(self.cutoffs) != sorted(set(self.cutoffs)) or any(c < 1 for c in self.cutoffs):
            raise MemspanError(
                f"cutoffs must be positive and increasing, not {list(self.cutoffs)}: "
                "give the ids at which a new cluster starts, for example 20000 40000 200000"
            )
