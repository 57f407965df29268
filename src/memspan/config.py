"""Every option, its default and its help. No torch here, so that ``memspan --help`` answers at once.

The string under each field is the help that the command line prints. Names and defaults are
exactly those of ``config.toml`` in a run folder and of the presets in ``presets/``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Generic, Literal, TypeVar

import tyro

from memspan.checks import check_types
from memspan.errors import MemspanError

MOST_TOKENS = 1 << 24
"""Ids of a vocabulary at most."""
Products = Literal["auto", "float32", "bfloat16"]
MatmulPrecision = Literal["auto", "highest", "high", "medium"]


@dataclass(frozen=True)
class TransformerXLConfig:
    """Transformer-XL backbone (Dai et al. 2019, arXiv 1901.02860)."""

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
    """Non-linearity of the feed-forward sub-layer (the paper: relu)."""
    memory_length: int = 64
    """Tokens of memory that each layer keeps, M. May be changed at evaluation."""
    attention_span: Literal["segment", "fixed"] = "segment"
    """segment: a query sees all of memory and its segment's past. fixed: exactly the last M
    positions, itself included ("same length"), which makes reading independent of cuts."""
    positions: Literal["sinusoidal", "learned"] = "sinusoidal"
    """Position term: the paper's projected sinusoids of the distance, or learned tables."""
    max_distance: int | None = None
    """Rows of the learned position tables: the longest span in use, memory and segment together
    (None: what training needs). Only for learned positions."""
    clamp_length: int | None = None
    """Distances over this many tokens share one position code (None: no clamping)."""
    tie_position_biases: bool = False
    """Share the position biases u and v over all layers."""
    normalisation: Literal["pre", "post"] = "pre"
    """Layer normalisation before each sub-layer, or after the residual sum as in the paper."""
    final_norm: bool = True
    """Normalise the last layer's output (pre-norm only; post-norm already ends in one)."""
    attention_bias: bool = False
    """Biases on the value and output projections."""
    initialisation: Literal["scaled", "papers"] = "scaled"
    """How weights begin. scaled: each matrix by its width and what it is for. papers: all from
    N(0, 0.02^2), whatever their width, which fits widths near 500 to 1,000."""
    dropout: float = 0.0
    """Dropout probability on embeddings, position codes and sub-layer outputs."""
    attention_dropout: float = 0.0
    """Dropout probability on attention weights."""

    def __post_init__(self) -> None:
        check_types(self)
        _at_least(1, self, "n_layers", "d_model", "n_heads", "d_ff")
        _at_least(0, self, "memory_length")
        _probability(self, "dropout", "attention_dropout")
        _check_attention(self)
        if self.attention_span == "fixed" and self.memory_length < 1:
            raise MemspanError(
                "attention_span fixed sees the last memory_length positions, so memory_length "
                "must be at least 1: raise it, or use attention_span segment"
            )

    @property
    def head_width(self) -> int:
        return self.d_head if self.d_head is not None else self.d_model // self.n_heads

    @property
    def table_rows(self) -> int:
        """Rows of a layer's position table."""
        return (self.max_distance or 0) if self.positions == "learned" else 0


@dataclass(frozen=True)
class CompressiveConfig:
    """Compressive Transformer backbone (Rae et al. 2019, arXiv 1911.05507)."""

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
    """Non-linearity of the feed-forward sub-layer (the paper: relu)."""
    memory_length: int = 64
    """Slots of memory that each layer keeps, one per token, M. May be changed at evaluation."""
    compressed_length: int = 64
    """Compressed slots that each layer keeps, C. May be changed at evaluation. 0: none."""
    compression_rate: int = 4
    """Slots of memory that are compressed into one, c. Each layer reaches M + c C tokens back."""
    compression: Literal["convolution", "mean", "max", "dilated-convolution", "most-used"] = (
        "convolution"
    )
    """What makes one slot of c. convolution: kernel and stride c (the paper's best). most-used: the
    slot that received most attention when it left memory."""
    auxiliary_loss: Literal["attention", "auto-encoding", "none"] = "attention"
    """What trains the compression: reconstructing the attention on what was compressed, or the slots
    themselves. none: only the task, see task_gradient."""
    task_gradient: bool = False
    """Let the task's loss train the compression too. It needs gradients over several segments:
    set train.accumulate and train.gradient_segments to 2 or more."""
    attention_span: Literal["segment", "fixed"] = "segment"
    """segment: a query sees both memories and its segment's past. fixed: exactly the last M + C
    slots, itself included."""
    positions: Literal["sinusoidal", "learned"] = "sinusoidal"
    """Position term: projected sinusoids of the distance in slots, or learned tables."""
    max_distance: int | None = None
    """Rows of the learned position tables: the longest span in use, both memories and segment
    together (None: what training needs). Only for learned positions."""
    clamp_length: int | None = None
    """Distances over this many slots share one position code (None: no clamping)."""
    tie_position_biases: bool = False
    """Share the position biases u and v over all layers."""
    normalisation: Literal["pre", "post"] = "pre"
    """Layer normalisation before each sub-layer, or after the residual sum as in the paper."""
    final_norm: bool = True
    """Normalise the last layer's output (pre-norm only; post-norm already ends in one)."""
    attention_bias: bool = False
    """Biases on the value and output projections."""
    initialisation: Literal["scaled", "papers"] = "scaled"
    """How weights begin. scaled: each matrix by its width and what it is for. papers: all from
    N(0, 0.02^2), whatever their width, which fits widths near 500 to 1,000."""
    dropout: float = 0.0
    """Dropout probability on embeddings, position codes and sub-layer outputs."""
    attention_dropout: float = 0.0
    """Dropout probability on attention weights."""

    def __post_init__(self) -> None:
        check_types(self)
        _at_least(1, self, "n_layers", "d_model", "n_heads", "d_ff")
        _at_least(0, self, "memory_length", "compressed_length")
        _probability(self, "dropout", "attention_dropout")
        if self.compression_rate < 2:
            raise MemspanError(
                f"compression_rate must be at least 2, not {self.compression_rate}: at 1 nothing is "
                "compressed, which is transformer-xl with a longer memory"
            )
        if self.memory_length < self.compression_rate - 1:
            raise MemspanError(
                f"memory_length {self.memory_length} is too short to compress "
                f"{self.compression_rate} slots into one: raise it to at least "
                f"{self.compression_rate - 1}, or lower compression_rate"
            )
        _check_attention(self)
        learns = "convolution" in self.compression and self.compressed_length > 0
        if learns and self.auxiliary_loss == "none" and not self.task_gradient:
            raise MemspanError(
                f"with auxiliary_loss none nothing would train the {self.compression}: set "
                "task_gradient, choose an auxiliary loss, or compression mean, max or most-used"
            )

    @property
    def head_width(self) -> int:
        return self.d_head if self.d_head is not None else self.d_model // self.n_heads

    @property
    def table_rows(self) -> int:
        """Rows of a layer's position table."""
        return (self.max_distance or 0) if self.positions == "learned" else 0


@dataclass(frozen=True)
class FeedbackConfig:
    """Feedback Transformer backbone (Fan et al. 2020, arXiv 2002.09402)."""

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
    """Non-linearity of the feed-forward sub-layer (the paper: relu)."""
    memory_length: int = 64
    """Tokens back that a token sees, the attention span S; one memory vector is kept of each. May be
    lowered at evaluation, and raised up to max_distance."""
    max_distance: int | None = None
    """Rows of the position tables, the longest span in use (None: memory_length)."""
    projections: Literal["shared", "per-layer"] = "shared"
    """Keys and values of the memory vectors: one projection for all layers, so that they are
    computed once, or one for each layer."""
    memory_vector: Literal["learned", "last", "mean"] = "learned"
    """A token's memory vector: its states in all layers by learned weights, its last layer's, or
    their mean."""
    normalisation: Literal["pre", "post"] = "pre"
    """Layer normalisation before each sub-layer, or after the residual sum as in the paper. Only
    pre has a fast path."""
    final_norm: bool = True
    """Normalise the last layer's output (pre-norm only; post-norm already ends in one)."""
    memory_norm: bool = True
    """Normalise memory vectors before they are projected (pre-norm only; with post-norm they are
    sums of normalised states). Without it they can grow from token to token without bound."""
    attention_bias: bool = False
    """Biases on the value and output projections."""
    value_bias: bool | None = None
    """A bias on the value projections alone (None: as attention_bias)."""
    adaptive_span: float | None = None
    """Each head learns how far it looks, up to memory_length (Sukhbaatar et al. 2019). The number is
    the weight of the spans' penalty in the loss, per token of span; the authors' for enwik8 is 5e-7
    (None: all heads look memory_length back). Only the reference knows it."""
    span_ramp: int = 32
    """adaptive_span: tokens over which a head's attention fades out at the end of its span."""
    initialisation: Literal["scaled", "papers"] = "scaled"
    """How weights begin. scaled: each matrix by its width and what it is for. papers: all from
    N(0, 0.02^2), whatever their width, which fits widths near 500 to 1,000."""
    dropout: float = 0.0
    """Dropout probability on embeddings and sub-layer outputs. With dropout, training takes the
    reference, which is several times slower."""
    attention_dropout: float = 0.0
    """Dropout probability on attention weights, likewise."""

    def __post_init__(self) -> None:
        check_types(self)
        _at_least(1, self, "n_layers", "d_model", "n_heads", "d_ff", "memory_length")
        _probability(self, "dropout", "attention_dropout")
        _at_least(1, self, "span_ramp")
        if self.adaptive_span is not None:
            _at_least(0, self, "adaptive_span")
        elif self.span_ramp != 32:
            raise MemspanError(
                "span_ramp belongs to adaptive spans: set adaptive_span, or leave it out"
            )
        if self.d_head is not None:
            _at_least(1, self, "d_head")
        elif self.d_model % self.n_heads:
            raise MemspanError(
                f"d_model {self.d_model} is not divisible by n_heads {self.n_heads}: "
                "change one of them, or set d_head"
            )
        if self.max_distance is not None and self.memory_length > self.max_distance:
            raise MemspanError(
                f"memory_length {self.memory_length} exceeds the position table's max_distance "
                f"{self.max_distance}: lower the one or raise the other"
            )

    @property
    def head_width(self) -> int:
        return self.d_head if self.d_head is not None else self.d_model // self.n_heads

    @property
    def table_rows(self) -> int:
        return self.memory_length if self.max_distance is None else self.max_distance


@dataclass(frozen=True)
class FastWeightsConfig:
    """Fast Weights backbone (Schlag, Irie, Schmidhuber 2021, arXiv 2102.11174)."""

    n_layers: int = 4
    """Number of layers."""
    d_model: int = 128
    """Width of the residual stream."""
    n_heads: int = 4
    """Heads per layer; each has a fast weight matrix."""
    d_head: int | None = None
    """Width of one head (None: d_model / n_heads)."""
    d_ff: int = 512
    """Inner width of the feed-forward sub-layer."""
    activation: Literal["relu", "gelu"] = "relu"
    """Non-linearity of the feed-forward sub-layer."""
    rule: Literal["delta", "sum", "outer-product"] = "delta"
    """How a token is written. delta: it replaces what its key held. sum: it is added.
    outer-product: the rule of 1991, f(W + a b), a loop over tokens."""
    outer_activation: Literal["tanh", "identity"] = "tanh"
    """The outer-product rule's f."""
    feature_map: Literal["dpfp", "elu", "favor", "softmax", "identity"] = "dpfp"
    """Map from keys and queries to features; their number is in docs/fast_weights.md."""
    nu: int = 1
    """dpfp: its rolls; 2 * d_head * nu features."""
    favor_features: int | None = None
    """favor: random projections m (None: d_head); 2 * m features."""
    favor_redraw: bool = False
    """favor: draw new projections for every training segment. What was written with the old ones
    cannot be read any more, so in training the memory then starts empty at every segment."""
    normalisation: Literal["sum", "attention", "none"] = "sum"
    """sum: features are divided by their sum. attention: outputs are divided by z . q, with z the
    sum of all keys. none: neither."""
    epsilon: float = 1e-6
    """Added to what normalisation divides by."""
    norm: Literal["pre", "post", "feed-forward"] = "pre"
    """Layer normalisation before each sub-layer, after each residual sum, or before the feed-forward
    only: attention then reads the residual stream as it is."""
    positions: Literal["none", "sinusoidal"] = "none"
    """Sinusoids of the absolute position, added to the input. The recurrence needs none."""
    chunk_size: int = 32
    """Tokens that are worked on at once; results do not depend on it."""
    recompute: bool = False
    """Training with less memory for about a third more time: compute most of the recurrence
    anew in the backward pass."""
    final_norm: bool = True
    """Normalise the last layer's output (post-norm already ends in one)."""
    initialisation: Literal["scaled", "papers"] = "scaled"
    """How weights begin. scaled: each matrix by its width and what it is for. papers: all from
    N(0, 0.02^2), whatever their width, which fits widths near 500 to 1,000."""
    dropout: float = 0.0
    """Dropout probability on embeddings and sub-layer outputs."""

    def __post_init__(self) -> None:
        check_types(self)
        _at_least(1, self, "n_layers", "d_model", "n_heads", "d_ff", "chunk_size")
        _at_least(0, self, "epsilon")
        _probability(self, "dropout")
        if self.d_head is None and self.d_model % self.n_heads:
            raise MemspanError(
                f"d_model {self.d_model} is not divisible by n_heads {self.n_heads}: "
                "change one of them, or set d_head"
            )
        for name in ("d_head", "favor_features"):
            if getattr(self, name) is not None:
                _at_least(1, self, name)
        if self.positions == "sinusoidal" and self.d_model % 2:
            raise MemspanError(
                f"sinusoidal positions need an even d_model, not {self.d_model}: "
                "change it, or use positions none"
            )
        if not 1 <= self.nu <= 2 * self.head_width - 1:
            raise MemspanError(
                f"nu must lie in 1 .. {2 * self.head_width - 1}, twice the head's width less one, "
                f"not {self.nu}: more rolls only repeat the same products"
            )
        self._refuse_options_of_others()
        if self.feature_map == "identity" and self.normalisation != "none":
            raise MemspanError(
                f"normalisation {self.normalisation} divides by a sum of features, which may be "
                "zero or negative with feature_map identity: use normalisation none, or another map"
            )

    def _refuse_options_of_others(self) -> None:
        if self.rule == "outer-product":
            if self.feature_map != "identity" or self.normalisation != "none":
                raise MemspanError(
                    "the outer-product rule writes and reads linear maps of its input: use "
                    "feature_map identity and normalisation none with it, or rule delta or sum"
                )
            if self.d_head is not None and self.d_head * self.n_heads != self.d_model:
                raise MemspanError(
                    "the outer-product rule reads with the input itself, cut into heads: leave "
                    "d_head at its default"
                )
            if self.recompute:
                raise MemspanError(
                    "recompute belongs to the chunked form, which the outer-product rule does not "
                    "have: drop it, or use rule delta or sum"
                )
        elif self.outer_activation != "tanh":
            raise MemspanError(
                f"outer_activation belongs to rule outer-product, not {self.rule}: drop one of them"
            )
        if self.feature_map != "dpfp" and self.nu != 1:
            raise MemspanError(
                f"nu belongs to feature_map dpfp, not {self.feature_map}: drop one of them"
            )
        if self.feature_map != "favor" and (self.favor_features is not None or self.favor_redraw):
            raise MemspanError(
                "favor_features and favor_redraw belong to feature_map favor, not "
                f"{self.feature_map}: drop them, or change the map"
            )

    @property
    def head_width(self) -> int:
        return self.d_head if self.d_head is not None else self.d_model // self.n_heads

    @property
    def table_rows(self) -> int:
        """Rows of a layer's position table."""
        return 0

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


@dataclass(frozen=True)
class EmbeddingConfig:
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
    """Which clusters' output projections are the embedding's projections."""
    output_dropout: float = 0.0
    """Dropout probability on the last hidden state, before the output head, as in the Transformer-XL
    authors' code."""

    def __post_init__(self) -> None:
        check_types(self)
        _probability(self, "output_dropout")
        _at_least(1, self, "div_val")
        if self.d_embed is not None:
            _at_least(1, self, "d_embed")
        if list(self.cutoffs) != sorted(set(self.cutoffs)) or any(c < 1 for c in self.cutoffs):
            raise MemspanError(
                f"cutoffs must be positive and increasing, not {list(self.cutoffs)}: "
                "give the ids at which a new cluster starts, for example 20000 40000 200000"
            )


@dataclass(frozen=True)
class DataConfig:
    """Text."""

    corpus: str = "python-stdlib"
    """A named corpus (see `memspan data list`), or a file, a folder or a quoted glob of text."""
    tokenizer: Literal["bytes", "characters", "words", "subwords"] = "bytes"
    """What a token is. subwords needs the extra `memspan[subwords]`. Words and characters that the
    vocabulary lacks are one unknown token; a text that has it is not scored in bits per byte."""
    vocab_size: int | None = None
    """Largest vocabulary, for words and subwords (None: words 300,000, subwords 8,192)."""
    document_reset: bool = False
    """Read every document by itself, in training and evaluation: nothing before its first token is
    seen, in the segment or in memory (off: the text is read on across its documents)."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.vocab_size is not None:
            _at_least(2, self, "vocab_size")
            refuse_oversized_vocabulary(self.vocab_size)
            if self.tokenizer in ("bytes", "characters"):
                raise MemspanError(
                    f"vocab_size belongs to the tokenizers words and subwords, not {self.tokenizer}: "
                    "drop one of them"
                )
        # They would reach the terminal, and config.toml cannot hold half a character.
        if any(
            ord(c) < 32 or 127 <= ord(c) < 160 or 0xD800 <= ord(c) < 0xE000 for c in self.corpus
        ):
            raise MemspanError(
                f"the corpus's name {self.corpus!r} has control characters or is no Unicode: "
                "rename the file"
            )


@dataclass(frozen=True)
class OptimConfig:
    """Optimiser: AdamW with a learning-rate schedule."""

    learning_rate: float = 2e-3
    """Highest learning rate, reached after warm-up."""
    min_learning_rate: float = 1e-4
    """Learning rate at the end of the cosine schedule."""
    schedule: Literal["cosine", "inverse-sqrt", "constant"] = "cosine"
    """Shape of the learning rate after warm-up."""
    warmup_steps: int = 100
    """Steps of linear warm-up."""
    weight_decay: float = 0.1
    """Decoupled weight decay, on matrices only."""
    beta1: float = 0.9
    """AdamW: decay of the gradient's mean."""
    beta2: float = 0.99
    """AdamW: decay of the squared gradient's mean."""
    clip_norm: float = 1.0
    """Clip the gradient to this norm (0: off)."""
    compression_learning_rate: float = 1.0
    """Learning rate of the Compressive Transformer's compression functions, as a multiple of
    learning_rate. 0: they stay as they begin."""

    def __post_init__(self) -> None:
        check_types(self)
        _at_least(0, self, "learning_rate", "min_learning_rate", "warmup_steps")
        _at_least(0, self, "weight_decay", "clip_norm", "compression_learning_rate")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise MemspanError("beta1 and beta2 must lie in [0, 1)")


@dataclass(frozen=True)
class TrainConfig:
    """Training loop."""

    steps: int = 1000
    """Updates to make."""
    batch_size: int = 12
    """Parallel streams of text, each with its own memory, B."""
    segment_length: int = 64
    """Tokens that a stream advances per pass, T; gradients stop at its border."""
    first_segment_length: int | None = None
    """Training curriculum: segments start this long and double, in equal shares of the steps up to
    curriculum_steps, to segment_length (None: segment_length from the start)."""
    curriculum_steps: int = 0
    """Step from which segment_length holds, with first_segment_length."""
    accumulate: int = 1
    """Segments whose gradients are averaged into one update."""
    accumulate_later: int | None = None
    """The same from step accumulate_from on: fewer updates with bigger effective batches late in
    training (None: no change)."""
    accumulate_from: int = 0
    """Step from which accumulate_later holds."""
    gradient_segments: int = 1
    """Segments of an update that gradients flow back through, by way of memory; 1: they stop at
    the segment's border. At most accumulate."""
    evaluate_every: int = 250
    """Steps between validations (0: only at the end)."""
    evaluate_tokens: int = 131_072
    """Tokens of the validation split scored at each validation (0: all)."""
    save_every: int = 250
    """Steps between checkpoints (0: only at the end)."""
    sample_tokens: int = 200
    """Tokens of sample text generated at each validation (0: none)."""
    seed: int = 1
    """Seed of all random numbers."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    precision: Products = "auto"
    """Precision of matrix products: auto is bfloat16 on CUDA and float32 elsewhere. A resumed run goes
    on in its own. On a CPU without AVX-512 bfloat16 is many times slower. Scores are always computed in
    float32."""
    matmul_precision: MatmulPrecision = "auto"
    """How products of float32 are computed, as in torch.set_float32_matmul_precision: auto is highest.
    medium, with AVX-512, uses another library of products; on processors with matrix units (AMX) it
    may round to bfloat16. high and medium on CUDA: TF32. Only for precision float32."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """With several processes: ddp, each has the whole model, or fsdp, each has a part of it."""
    non_finite: Literal["stop", "skip"] = "stop"
    """A loss or gradient that is NaN or infinite: stop the run, saying where, or skip that update
    and count it."""
    tracker: Literal["none", "tensorboard", "trackio"] = "none"
    """Also send metrics to this tracker (an extra); metrics.jsonl is always written."""

    def curriculum(self) -> list[tuple[int, int]]:
        """Stages ``(first step, segment length)``, ascending."""
        lengths = []
        length = self.first_segment_length or self.segment_length
        while length < self.segment_length:
            lengths.append(length)
            length *= 2
        n = len(lengths)
        stages = [(-(-i * self.curriculum_steps // n), length) for i, length in enumerate(lengths)]
        return [*stages, (self.curriculum_steps if lengths else 0, self.segment_length)]

    def segment_length_at(self, step: int) -> int:
        """Tokens per segment in the update after ``step`` updates."""
        return [length for first, length in self.curriculum() if first <= step][-1]

    def tokens_read(self, step: int) -> int:
        """Tokens of each stream that ``step`` updates have read."""
        stages = self.curriculum()
        ends = [first for first, _ in stages[1:]] + [step]
        return sum(
            length * (self.segments_read(min(end, step)) - self.segments_read(min(first, step)))
            for (first, length), end in zip(stages, ends, strict=True)
        )

    def segments_per_update(self, step: int) -> int:
        """Segments that the update after ``step`` updates averages."""
        later = self.accumulate_later
        return self.accumulate if later is None or step < self.accumulate_from else later

    def segments_read(self, step: int) -> int:
        """Segments of each stream that ``step`` updates have read."""
        early = min(step, self.accumulate_from) if self.accumulate_later is not None else step
        return early * self.accumulate + (step - early) * (self.accumulate_later or 0)

    def __post_init__(self) -> None:
        check_types(self)
        _at_least(1, self, "steps", "batch_size", "segment_length", "accumulate")
        _at_least(1, self, "gradient_segments")
        _at_least(0, self, "curriculum_steps")
        if self.first_segment_length is not None:
            _at_least(1, self, "first_segment_length")
            if self.first_segment_length > self.segment_length:
                raise MemspanError(
                    f"a curriculum grows: first_segment_length {self.first_segment_length} is over "
                    f"segment_length {self.segment_length}: lower it"
                )
        if (self.first_segment_length is None) != (self.curriculum_steps == 0):
            raise MemspanError(
                "a curriculum needs both first_segment_length and curriculum_steps: set both, or "
                "neither"
            )
        _at_least(0, self, "accumulate_from")
        if self.accumulate_later is not None:
            _at_least(1, self, "accumulate_later")
        elif self.accumulate_from:
            raise MemspanError(
                "accumulate_from says when accumulate_later holds: set both, or neither"
            )
        most = max(self.accumulate, self.accumulate_later or 1)
        if self.gradient_segments > most:
            raise MemspanError(
                f"gradient_segments {self.gradient_segments} is over accumulate {most}: gradients "
                "flow within one update; raise accumulate, or lower gradient_segments"
            )
        _at_least(0, self, "evaluate_every", "evaluate_tokens", "save_every", "sample_tokens")
        _at_least(0, self, "seed")
        refuse_contradictory_precision(self.precision, self.matmul_precision)


MODELS: dict[str, type] = {
    "transformer-xl": TransformerXLConfig,
    "compressive": CompressiveConfig,
    "feedback": FeedbackConfig,
    "fast-weights": FastWeightsConfig,
}
"""Architecture name -> config class: the torch-free half of ``memspan.models.ARCHITECTURES``."""

ModelConfig = TypeVar("ModelConfig")


@dataclass(frozen=True)
class RunConfig(Generic[ModelConfig]):
    """All that defines a training run; what `config.toml` in its folder holds."""

    model: ModelConfig
    architecture: Annotated[
        Literal["transformer-xl", "compressive", "feedback", "fast-weights"],
        tyro.conf.arg(name="model"),
    ] = "transformer-xl"
    """Architecture; --model.* below are its options."""
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        check_types(self)
        kind = MODELS[self.architecture]
        if not isinstance(self.model, kind):
            raise MemspanError(
                f"architecture {self.architecture} goes with a {kind.__name__}, not a "
                f"{type(self.model).__name__}: change one of them"
            )
        if self.architecture != "compressive" and self.optim.compression_learning_rate != 1:
            raise MemspanError(
                f"compression_learning_rate belongs to architecture compressive, not "
                f"{self.architecture}: drop it"
            )


def refuse_contradictory_precision(precision: str, matmul_precision: str) -> None:
    """Raise :class:`MemspanError` where float32 products are to be rounded beside bfloat16 ones: those
    that bfloat16 leaves in float32, such as recurrences over a memory, are those not to be rounded."""
    if precision == "bfloat16" and matmul_precision in ("high", "medium"):
        raise MemspanError(
            f"with precision bfloat16, matmul_precision {matmul_precision} would round what must stay "
            "float32: use precision float32, or matmul_precision highest"
        )


def refuse_oversized_vocabulary(vocab_size: int) -> None:
    """Raise :class:`MemspanError` for a vocabulary that no machine trains: tables are as long."""
    if vocab_size > MOST_TOKENS:
        raise MemspanError(f"vocab_size must be at most {MOST_TOKENS:,}, not {vocab_size}")


def _check_attention(config: TransformerXLConfig | CompressiveConfig) -> None:
    """What the architectures with relative positions ask of their options."""
    if config.d_head is None and config.d_model % config.n_heads:
        raise MemspanError(
            f"d_model {config.d_model} is not divisible by n_heads {config.n_heads}: "
            "change one of them, or set d_head"
        )
    for name in ("d_head", "max_distance", "clamp_length"):
        if getattr(config, name) is not None:
            _at_least(1, config, name)
    if config.max_distance is not None and config.positions != "learned":
        raise MemspanError(
            f"max_distance belongs to positions learned, not {config.positions}: drop one of them"
        )
    if config.positions == "sinusoidal" and config.d_model % 2:
        raise MemspanError(
            f"sinusoidal positions need an even d_model, not {config.d_model}: "
            "change it, or use positions learned"
        )


def _at_least(low: float, config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value < low:
            raise MemspanError(f"{name} must be at least {low}, not {value}")


def _probability(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not 0 <= value < 1:
            raise MemspanError(f"{name} is a probability in [0, 1), not {value}")
