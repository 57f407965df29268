"""Loss against the size of the memory at evaluation, on the same tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from memspan.errors import MemspanError, NonFiniteError
from memspan.lab.measurement.statistics import LEAST_BLOCKS, Blocks, Estimate
from memspan.lab.measurement.subject import Budget, RunSubject
from memspan.memory import Memory
from memspan.models import Reader
from memspan.models.options import BackboneConfig
from memspan.nn import NOT_SCORED

STREAMS = 8
"""Parts of the text that are read side by side."""


@dataclass(frozen=True)
class MemoryLengthPoint:
    """The loss with a memory of this many slots."""

    slots: int
    bits_per_byte: float
    difference: Estimate
    """Difference from the loss with training's memory."""
    full: bool
    """True if the memory was full, at least in one stream, before the first token was scored."""


@dataclass(frozen=True)
class MemoryLength:
    """One of the architecture's memory sizes varied, the others as in training."""

    option: str
    """Name of the size, as ``evaluate`` takes it."""
    trained: int
    """Slots in training."""
    targets: int
    """Tokens that were scored with every size."""
    blocks: int
    """Segments with these tokens; the intervals come from how they differ."""
    points: tuple[MemoryLengthPoint, ...]
    """Losses in the order of sizes."""
    impossible: dict[int, str]
    """Sizes that the model cannot have, and why."""


def sizes(config: BackboneConfig) -> dict[str, int]:
    """The options of the memory that count slots, and their values in training."""
    names = [option.name for option in dataclasses.fields(config.memory_options)]
    values = {name: getattr(config, name) for name in names}
    return {name: value for name, value in values.items() if type(value) is int and value > 0}


def fits(subject: RunSubject) -> bool:
    """True if enough of the text is left to score after the first segments of every stream."""
    rows = _n_streams(subject)
    return len(subject.tokens) // rows > (_least_segments(rows) - 1) * subject.segment_length


def _n_streams(subject: RunSubject) -> int:
    return min(STREAMS, max(1, len(subject.tokens) // (4 * subject.segment_length)))


def _least_segments(rows: int) -> int:
    """Segments of a stream, so that the scored half has :data:`LEAST_BLOCKS` over all streams."""
    return max(2, 2 * -(-LEAST_BLOCKS // rows) - 1)


def measured(
    subject: RunSubject, option: str, trained: int, warm_up: int, budget: Budget
) -> Iterator[MemoryLength]:
    """The loss with 0, 1/4, 1/2, 1, 2 and 4 times the slots of training, on more and more tokens.

    All sizes read the same streams segment by segment, so that they are compared on the same tokens
    whenever the budget ends. ``warm_up``: tokens of each stream that are read before any is scored, to
    fill the memories; half of those read if the budget ends early.
    """
    rows = _n_streams(subject)
    least = _least_segments(rows)
    length = len(subject.tokens) // rows
    readers: dict[int, Reader] = {}
    impossible: dict[int, str] = {}
    for slots in sorted({0, trained // 4, trained // 2, trained, 2 * trained, 4 * trained}):
        try:
            memory = subject.model.initial_memory(rows, **{option: slots})
            readers[slots] = subject.reader(rows, memory)
        except MemspanError as error:
            impossible[slots] = str(error)
    nats: list[np.ndarray] = []
    n_bytes: list[np.ndarray] = []
    targets: list[int] = []
    most_unscored = -(-warm_up // subject.segment_length)
    full_after: dict[int, int] = {}
    """Number of segments that filled the memory, by slots."""

    def so_far() -> MemoryLength:
        # With few segments only half, so that some are left to score.
        unscored = min(most_unscored, len(nats) // 2)
        blocks = Blocks(np.concatenate(nats[unscored:]), np.concatenate(n_bytes[unscored:]))
        own = list(readers).index(trained)
        points = tuple(
            MemoryLengthPoint(
                slots,
                float(blocks.bits_per_byte[i]),
                blocks.difference(i, own),
                full=full_after.get(slots, len(nats)) <= unscored,
            )
            for i, slots in enumerate(readers)
        )
        return MemoryLength(
            option,
            trained,
            targets=sum(targets[unscored:]),
            blocks=rows * (len(nats) - unscored),
            points=points,
            impossible=dict(sorted(impossible.items())),
        )

    for start in range(0, length, subject.segment_length):
        first = np.arange(rows) * length + start
        segment = subject.segment(first, min(subject.segment_length, length - start))
        whole = ((0, segment.inputs.shape[1]),)
        losses = {}
        for slots, reader in list(readers.items()):
            try:
                losses[slots] = subject.read(segment, whole, reader).sum(1)
            except NonFiniteError:
                raise
            except MemspanError as error:
                # The positions do not reach so far, which some architectures' readers notice only here.
                impossible[slots] = str(error)
                del readers[slots]
        if trained not in readers:
            return
        nats.append(np.stack([losses[slots] for slots in readers], -1))
        n_bytes.append(subject.n_bytes(segment.targets))
        targets.append(int((segment.targets != NOT_SCORED).sum()))
        # A reader's memory is a copy, and it does not matter what fills up later.
        waiting = readers.keys() - full_after.keys() if len(nats) <= most_unscored else ()
        full_after |= {n: len(nats) for n in waiting if _is_full(readers[n].memory)}
        if len(nats) >= least and len(nats).bit_count() == 1:
            yield so_far()
        if budget.left() < 0:
            break
    if len(nats) >= least:
        yield so_far()


def _is_full(memory: Memory) -> bool:
    """True if a row's slots are all in use, or the architecture counts none."""
    counts = memory.counts()
    full = torch.ones(memory.batch_size, dtype=torch.bool)
    for name, slots in memory.slots().items():
        full &= counts[name] == slots
    return bool(full.any())
