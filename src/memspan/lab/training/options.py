"""Options of the optimiser and of the training loop."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from memspan.calls import Options
from memspan.checks import (
    MOST,
    MatmulPrecision,
    Products,
    at_least,
    check_types,
    refuse_contradictory_precision,
)
from memspan.errors import MemspanError


@dataclass(frozen=True)
class OptimConfig(Options):
    """Optimiser and learning-rate schedule."""

    optimiser: Literal["adamw", "muon", "sgd", "own"] = "adamw"
    """adamw (Adam if weight_decay is 0); sgd; muon for the layers' weight matrices and adamw for
    everything else, which needs hardware with fast bfloat16; own: made by a function that is passed
    to memspan.train in Python."""
    learning_rate: float = 2e-3
    """Peak learning rate, reached after warm-up."""
    min_learning_rate: float = 1e-4
    """Learning rate at the end of the schedules cosine, linear and warmup-stable-decay."""
    schedule: Literal["cosine", "linear", "warmup-stable-decay", "inverse-sqrt", "constant"] = (
        "cosine"
    )
    """Shape of the learning rate after warm-up. warmup-stable-decay: constant, then linear decay
    over the last decay_steps."""
    warmup_steps: int = 100
    """Steps of linear warm-up."""
    decay_steps: int | None = None
    """Last steps, in which warmup-stable-decay lowers the learning rate (None: a fifth of all)."""
    weight_decay: float = 0.1
    """Decoupled weight decay, on matrices only; sgd adds it to their gradient."""
    beta1: float = 0.9
    """adamw: decay of the gradient's mean; muon and sgd: momentum."""
    beta2: float = 0.99
    """adamw: decay of the squared gradient's mean."""
    clip_norm: float = 1.0
    """Clip the gradient to this norm (0: off)."""
    compression_learning_rate: float = 1.0
    """Learning rate of parameters that an auxiliary loss trains (compression functions), as a
    multiple of learning_rate. 0: they keep their initial values."""

    def __post_init__(self) -> None:
        check_types(self)
        at_least(0, self, "learning_rate", "min_learning_rate", "warmup_steps")
        at_least(0, self, "weight_decay", "clip_norm", "compression_learning_rate")
        at_least(1, self, "decay_steps")
        if self.decay_steps is not None and self.schedule != "warmup-stable-decay":
            raise MemspanError(
                f"decay_steps is for the schedule warmup-stable-decay, not {self.schedule}: drop it, "
                "or change the schedule"
            )
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise MemspanError("beta1 and beta2 must lie in [0, 1)")


MOST_SEGMENTS = 1 << 16
"""Most segments in one update."""
BUDGETS = ("steps", "max_tokens", "epochs")
"""Options that say how long a run trains; each run has exactly one."""


@dataclass(frozen=True)
class TrainConfig(Options):
    """Training loop."""

    steps: int | None = None
    """Updates to make. A run has one budget: this, max_tokens or epochs; it replaces that of a preset
    or of the run to resume."""
    max_tokens: int | None = None
    """Instead of steps: most training tokens to read, over all rows."""
    epochs: float | None = None
    """Instead of steps: number of times to read the training text, rounded up to whole updates."""
    batch_size: int = 12
    """Parallel streams of text, each with its own memory, B."""
    segment_length: int = 64
    """Tokens of each stream that one pass reads, T; gradients stop at a segment's start."""
    first_segment_length: int | None = None
    """Training curriculum: segments start at this length and double, in equal shares of
    curriculum_steps, until they have segment_length (None: segment_length from the start)."""
    curriculum_steps: int = 0
    """With first_segment_length: step from which segments have segment_length."""
    accumulate: int = 1
    """Segments whose gradients are averaged into one update."""
    accumulate_later: int | None = None
    """Replaces accumulate from step accumulate_from on, for larger effective batches late in
    training (None: no change)."""
    accumulate_from: int = 0
    """Step from which accumulate_later replaces accumulate."""
    gradient_segments: int = 1
    """Segments of an update through which gradients flow back via memory, at most accumulate; 1: they
    stop at a segment's start."""
    recompute: bool = False
    """Activation checkpointing: each layer keeps only its inputs, and is computed again in the
    backward pass. It takes less memory and a third to a half more time, and changes no numbers; a
    run may be resumed with or without it. Layers that read token by token save nothing within a
    segment, only with gradient_segments over 1."""
    evaluate_every: int = 250
    """Steps between validations (0: only at the end)."""
    evaluate_tokens: int = 131_072
    """Tokens of the validation split scored at each validation (0: all)."""
    early_stopping_patience: int | None = None
    """Stop after this many validations in a row that did not lower the best validation loss (None:
    train to the end)."""
    early_stopping_threshold: float = 0.0
    """Nats per token by which a validation must lower the best loss to count for early stopping."""
    save_every: int = 250
    """Steps between checkpoints (0: only at the end)."""
    keep: int = 2
    """Newest checkpoints to keep, besides the best by validation loss (0: keep all)."""
    sample_tokens: int = 300
    """Tokens of sample text generated at each validation (0: none)."""
    seed: int = 1
    """Seed of all random numbers."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    precision: Products = "auto"
    """Precision of matrix products; auto means float32. A resumed run keeps its own. On a CPU
    without AVX-512, bfloat16 is many times slower. Scores are always computed in float32."""
    matmul_precision: MatmulPrecision = "auto"
    """Precision of float32 matrix products, as in torch.set_float32_matmul_precision; auto means
    highest. With AVX-512, medium uses a different library, which may round to bfloat16 on
    processors with matrix units (AMX). On CUDA, high and medium use TF32. Only for precision
    float32."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """With several processes, ddp gives each the whole model, and fsdp a part of it."""
    non_finite: Literal["stop", "skip"] = "stop"
    """Reaction to a loss or gradient that is NaN or infinite. stop: end the run and say where.
    skip: leave out that update and count it."""
    tracker: tuple[Literal["none", "tensorboard", "trackio", "wandb"], ...] = ()
    """Libraries that also get the metrics (none: no tracker); metrics.jsonl is always written."""

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

    def updates(self, row_length: int, step: int = 0, tokens_read: int = 0) -> int:
        """Updates that the budget allows, including those already made.

        Args:
            row_length: tokens of each stream until the text starts again.
            step: updates already made, perhaps with other segments.
            tokens_read: tokens of each stream that these have read.
        """
        if self.steps is not None:
            return self.steps

        more = tokens_read - self.tokens_read(step)

        def read(step: int) -> int:
            return self.batch_size * (self.tokens_read(step) + more)

        if self.max_tokens is not None:
            return bisect_right(range(MOST), self.max_tokens, key=read) - 1
        assert self.epochs is not None
        # The rest of a row after its last whole segment is not read.
        whole = self.batch_size * (row_length - row_length % self.segment_length)
        return bisect_left(range(MOST), math.ceil(Fraction(self.epochs) * whole), key=read)

    def checkpoints(self, steps: int) -> int:
        """Checkpoints on the disk at once, at most, in a run of ``steps`` updates."""
        due = [every for every in (self.save_every, self.evaluate_every) if every]
        # One at the end; if both are due, there is still one.
        made = 1 + sum(steps // every for every in due)
        if len(due) == 2:
            made -= steps // math.lcm(*due)
        # The best, and the one that is being written.
        return min(made, self.keep + 2) if self.keep else made

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
        trackers = dict.fromkeys(name for name in self.tracker if name != "none")
        object.__setattr__(self, "tracker", tuple(trackers))
        at_least(1, self, "batch_size", "segment_length", "first_segment_length", "accumulate")
        at_least(1, self, "accumulate_later", "gradient_segments", "steps")
        at_least(1, self, "early_stopping_patience")
        at_least(0, self, "curriculum_steps", "accumulate_from", "early_stopping_threshold")
        at_least(0, self, "evaluate_every", "evaluate_tokens", "save_every", "keep")
        at_least(0, self, "sample_tokens", "seed")
        refuse_contradictory_precision(self.precision, self.matmul_precision)
        self._check_segments()
        self._check_budget()
        self._check_early_stopping()

    def _check_budget(self) -> None:
        budgets = [name for name in BUDGETS if getattr(self, name) is not None]
        if len(budgets) > 1:
            raise MemspanError(
                f"{' and '.join(budgets)} are different budgets, and a run has one: drop all but one "
                "(None in its place drops one)"
            )
        if not budgets:
            object.__setattr__(self, "steps", 1000)
        if self.epochs is not None and self.epochs <= 0:
            raise MemspanError(f"epochs must be more than 0, not {self.epochs}")
        first = self.batch_size * self.tokens_read(1)
        if self.max_tokens is not None and self.max_tokens < first:
            raise MemspanError(
                f"max_tokens {self.max_tokens} is less than one update reads, {first:,}: raise it"
            )

    def _check_segments(self) -> None:
        for name in ("accumulate", "accumulate_later"):
            # Their losses are kept until the update.
            if (getattr(self, name) or 0) > MOST_SEGMENTS:
                raise MemspanError(
                    f"{name} must be at most {MOST_SEGMENTS:,} segments to an update: lower it"
                )
        if (self.first_segment_length or 0) > self.segment_length:
            raise MemspanError(
                f"a curriculum grows: first_segment_length {self.first_segment_length} is over "
                f"segment_length {self.segment_length}: lower it"
            )
        if (self.first_segment_length is None) != (self.curriculum_steps == 0):
            raise MemspanError(
                "a curriculum needs both first_segment_length and curriculum_steps: set both, or "
                "neither"
            )
        if self.accumulate_later is None and self.accumulate_from:
            raise MemspanError(
                "accumulate_from has no effect without accumulate_later: set both, or neither"
            )
        most = max(self.accumulate, self.accumulate_later or 1)
        if self.gradient_segments > most:
            raise MemspanError(
                f"gradient_segments {self.gradient_segments} is over accumulate {most}: gradients "
                "flow within one update; raise accumulate, or lower gradient_segments"
            )

    def _check_early_stopping(self) -> None:
        if self.early_stopping_patience is None and self.early_stopping_threshold:
            raise MemspanError(
                "early_stopping_threshold is for early_stopping_patience: set both, or set the "
                "threshold to 0"
            )
        if self.early_stopping_patience is not None and not self.evaluate_every:
            raise MemspanError(
                "early_stopping_patience counts validations, and evaluate_every 0 makes none: "
                "raise it, or drop early_stopping_patience"
            )
