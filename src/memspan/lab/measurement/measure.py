"""All measurements of one run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from memspan.calls import checked
from memspan.errors import MemspanError
from memspan.lab.data.corpora import ALL
from memspan.lab.installed import require
from memspan.lab.measurement import inside, memory_length, repeats, span
from memspan.lab.measurement.inside import Attention, Retention
from memspan.lab.measurement.memory_length import MemoryLength
from memspan.lab.measurement.repeats import Repeats
from memspan.lab.measurement.span import Span
from memspan.lab.measurement.subject import Budget, RunSubject, Subject
from memspan.lab.runs.run import is_run, opened, precision_for
from memspan.lab.runs.texts import text_of
from memspan.native.waiting import sharing_cores
from memspan.precision import Precision

T = TypeVar("T")
LEAST_TOKENS = 32
"""Texts with fewer tokens are refused."""
TEXT = "tiny-shakespeare-held-out"
"""The text that models without one of their own are measured on."""


@dataclass(frozen=True)
class Measurement:
    """The results of measuring how far back a run remembers."""

    run: str
    """The name as given: a run's folder, or another model."""
    architecture: str
    parameters: int
    corpus: str
    """Name or path of the text."""
    split: str
    """The part of it that was read."""
    tokenizer: str
    """Kind of the tokeniser."""
    vocabulary: str
    """SHA-256 of the tokeniser: distances in tokens can be compared where it is the same."""
    segment_length: int
    """Tokens per step, T; a run's as in training."""
    window: int | None
    """Tokens that a model of transformers can see (None: any number)."""
    state_bytes: int
    """Bytes that one row carries after ``longest`` tokens, or after a window's."""
    longest: int
    """Longest distance that was requested and that the text allows, in tokens."""
    budget: float
    """CPU seconds that were allowed."""
    span: Span | None = None
    memory_lengths: tuple[MemoryLength, ...] = ()
    """One per size of the architecture's memory."""
    repeats: Repeats | None = None
    attention: Attention | None = None
    retention: Retention | None = None
    left_out: tuple[str, ...] = ()
    """Lines about measurements that were left out, or not made as requested, and why."""
    interrupted: bool = False
    """True if Ctrl-C ended it."""
    seconds: float = 0.0
    """CPU seconds that were spent."""

    def is_empty(self) -> bool:
        """True if nothing was measured."""
        parts = (self.span, self.repeats, self.attention, self.retention)
        return not self.memory_lengths and all(part is None for part in parts)

    def as_dict(self) -> dict[str, object]:
        """All numbers, plain JSON values; only means of the span's losses."""
        found = asdict(self)
        for name in ("first", "losses") if self.span is not None else ():
            del found["span"][name]
        return found


@checked
@sharing_cores()
def measure(
    run: object,
    corpus: str | Path | None = None,
    *,
    field: str | None = None,
    split: str = "validation",
    longest: int = 2048,
    budget: float = 45.0,
    precision: Precision | None = None,
    tokenizer: str | None = None,
    trust_remote_code: bool = False,
    device: str = "auto",
    progress: Callable[[float, float], None] | None = None,
) -> Measurement:
    """Measure how far back a trained model remembers, as ``memspan measure`` does.

    More CPU time means more tokens and narrower intervals. After Ctrl-C, what is done is returned.

    Args:
        run: a run or its folder; or any language model that carries state, or the name of one: what
            :func:`memspan.check` takes.
        corpus: a named corpus, file, folder or glob (None: the run's own; for other models
            ``tiny-shakespeare-held-out``, which comes with memspan).
        field: the field or column with the corpus's text, in JSON Lines, CSV, Parquet and data sets
            (None: as in training).
        split: ``train``, ``validation``, ``test``, or ``all``: the whole text, in order.
        longest: longest distance to measure, in tokens; a short text allows less.
        budget: CPU seconds to spend on measuring, of all threads together.
        precision: of matrix products (None: float32, multiplied as in training). For runs.
        tokenizer: ``bytes``, a ``tokenizer.json``, or a folder in transformers' format (None: the
            model's own, or bytes). Runs have theirs.
        trust_remote_code: execute code that comes with a folder in transformers' format.
        device: where a model other than a run is read: ``auto``, ``cpu``, ``cuda``, ...
        progress: called with the CPU seconds spent so far and ``budget`` (None: nothing is shown).

    Raises:
        MemspanError: there is no such model, text or split; the model carries no state, returns no
            logits or has no tokeniser; the text is too short, or the budget too small, for anything.
        NonFiniteError: a loss is NaN or infinite.

    Example::

        measurement = memspan.measure("runs/book", budget=300)
        print(measurement.span.tokens, measurement.span.low, measurement.span.high)
    """
    if longest < 2:
        raise MemspanError(f"longest must be at least 2 tokens, not {longest}")
    if not budget > 0:
        raise MemspanError(f"budget must be more than 0 seconds, not {budget:g}")
    corpus = None if corpus is None else str(corpus)
    subject: Subject
    left_out: list[str] = []
    if is_run(run):
        if tokenizer is not None:
            raise MemspanError("a run has its own tokeniser: drop tokenizer (--tokenizer)")
        run = opened(run)
        text = text_of(run, corpus, field, split, progress is not None)
        subject = RunSubject(
            model=run.model,
            tokenizer=run.tokenizer,
            tokens=text.tokens,
            segment_length=run.config.train.segment_length,
            document_starts=text.document_starts,
            precision=precision or precision_for(run),
        )
        name = str(run.folder)
        corpus = text.corpus
        architecture = run.config.architecture
        module: nn.Module = run.model
    else:
        if precision is not None:
            raise MemspanError("a precision is for runs: other models are read as they are")
        require("statelaws")
        from memspan.lab.measurement.stateful import subject_of

        name = str(run) if isinstance(run, str | Path) else type(run).__name__
        corpus = corpus or TEXT
        subject, left_out = subject_of(
            run,
            corpus,
            field,
            split,
            tokenizer,
            trust_remote_code,
            device,
            progress is not None,
            name,
        )
        module = subject.model.module
        architecture = type(module).__name__
    fits, too_long = _fitting(len(subject.tokens), longest, split)
    measuring = _Measuring(subject, fits, budget, progress, left_out + too_long)
    found = Measurement(
        run=name,
        architecture=architecture,
        parameters=sum(p.numel() for p in module.parameters()),
        corpus=corpus,
        split=split,
        tokenizer=subject.tokenizer.kind,
        vocabulary=subject.tokenizer.vocabulary_hash,
        segment_length=subject.segment_length,
        window=subject.window,
        state_bytes=subject.state_bytes(fits),
        longest=fits,
        budget=budget,
        **measuring.all(),
    )
    if found.is_empty() and not found.interrupted:
        raise MemspanError(
            f"a budget of {budget:g} CPU seconds is too small to measure anything of {name}: "
            "raise it (--budget)"
        )
    for line in found.left_out:
        logging.getLogger("memspan").warning(f"{name}: left out: {line}")
    return found


def _fitting(n_tokens: int, longest: int, split: str) -> tuple[int, list[str]]:
    """The longest distance that this many tokens allow, a power of two, and a remark if shorter."""
    if n_tokens < LEAST_TOKENS:
        raise MemspanError(
            f"measuring needs at least {LEAST_TOKENS} tokens, and the split {split} has "
            f"{n_tokens}: give a longer text (--corpus)"
            + (f", or the whole of this one (--split {ALL})" if split != ALL else "")
        )
    fits = 1 << (min(longest, n_tokens // 2).bit_length() - 1)
    if fits > longest // 2:
        return fits, []
    return fits, [f"distances over {fits:,}: the text ({split}) has only {n_tokens:,} tokens"]


class _Measuring:
    """Runs one measurement after the other, until the budget is spent or Ctrl-C is pressed."""

    def __init__(
        self,
        subject: Subject,
        longest: int,
        seconds: float,
        progress: Callable[[float, float], None] | None,
        left_out: list[str],
    ) -> None:
        self.subject = subject
        self.longest = longest
        self.left_out = left_out
        self.interrupted = False
        self.too_small = f"its share of the budget of {seconds:g} s is too small"

        def tell() -> None:
            if progress is not None:
                progress(min(self.budget.spent(), seconds), seconds)

        self.budget = Budget(seconds, tell)

    def all(self) -> dict[str, Any]:
        """The fields of a :class:`Measurement`."""
        subject = self.subject
        longest = self.longest
        found: dict[str, Any] = {}
        found["span"] = self._last("span", 0.5, partial(span.measured, subject, longest))
        if isinstance(subject, RunSubject):
            found["memory_lengths"] = tuple(self._memory_lengths(subject))
        if longest < repeats.LENGTH:
            self.left_out.append(
                f"repeats: a string has {repeats.LENGTH} tokens, and the text allows no longer "
                f"distance than {longest}"
            )
        elif (subject.tokens == subject.tokenizer.unknown).all():
            self.left_out.append("repeats: all tokens of the text are unknown to the run")
        else:
            found["repeats"] = self._last(
                "repeats", 0.7, partial(repeats.measured, subject, longest)
            )
        for name, part in found.items():
            if isinstance(part, Span | Repeats) and part.longest < longest:
                self.left_out.append(f"{name}, distances over {part.longest:,}: {self.too_small}")
        if not isinstance(subject, RunSubject):
            self.left_out.append("memory length, attention, values: for runs of memspan")
        else:
            backbone = subject.model.backbone
            if inside.exists(subject, backbone.attention_weights):
                measured = partial(inside.attention, subject, longest)
                found["attention"] = self._last("attention", 0.6, measured)
            if inside.exists(subject, backbone.write_retention):
                # History, a value, and as many tokens after it.
                most = min(longest, len(subject.tokens) // 2 - 2)
                kept = partial(inside.retention, subject, most)
                found["retention"] = self._last("values", 1.0, kept)
        return found | {
            "left_out": tuple(self.left_out),
            "interrupted": self.interrupted,
            "seconds": round(self.budget.spent(), 2),
        }

    def _last(self, name: str, share: float, measured: Callable[[Budget], Iterator[T]]) -> T | None:
        """The last result of a measurement, each of which has more tokens than the one before.

        ``share``: of the remaining budget, for this measurement.
        """
        found = None
        try:
            if not self.interrupted and self.budget.left() > 0:
                for result in measured(self.budget.share(share)):
                    found = result
        except KeyboardInterrupt:
            self.interrupted = True
        if found is None:
            why = "interrupted" if self.interrupted else self.too_small
            self.left_out.append(f"{name}: {why}")
        return found

    def _memory_lengths(self, subject: RunSubject) -> Iterator[MemoryLength]:
        options = memory_length.sizes(subject.model.backbone.config)
        if not options:
            self.left_out.append("memory length: this architecture's memory has no size to vary")
        elif not memory_length.fits(subject):
            self.left_out.append("memory length: the text has too few segments")
            return
        for option, trained in options.items():
            measured = partial(memory_length.measured, subject, option, trained, self.longest)
            found = self._last(option.replace("_", " "), 0.4 / len(options), measured)
            if found is not None:
                self.left_out += [f"{option} {n}: {why}" for n, why in found.impossible.items()]
                if not_full := [f"{point.slots:,}" for point in found.points if not point.full]:
                    self.left_out.append(
                        f"{option} {', '.join(not_full)}: not full before the first scored token, for "
                        "which the text, --longest or the budget is too small"
                    )
                yield found
