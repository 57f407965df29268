"""What a run would take, before any of it is made: ``memspan train --dry-run``."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from memspan.data.corpora import is_local
from memspan.data.options import DataConfig, title
from memspan.data.prepared import TokenizedCorpus, prepare
from memspan.data.token_files import TokenFile
from memspan.data.tokenizers.bytes import ByteTokenizer
from memspan.data.tokenizers.registry import read_tokenizer
from memspan.data.tokenizers.words import WordTokenizer
from memspan.devices import device_for
from memspan.distributed.processes import ALONE, Processes, own_device
from memspan.errors import MemspanError, counted
from memspan.invocation import command
from memspan.models.options import BackboneConfig
from memspan.models.sizes import memory_of
from memspan.runs.options import RunConfig
from memspan.training.optimisers import MakeOptimiser, with_optimiser
from memspan.training.sample import line, made_up_tokens, resident_bytes, shallow
from memspan.training.sizes import (
    Needs,
    Sampled,
    in_units,
    needs,
    on_this_machine,
    sampled,
    sizes_of,
)
from memspan.training.start import refuse_fsdp_alone
from memspan.training.state import TrainingState, refuse_sharing, streams_of
from memspan.training.updates import Updater

LONGEST_UPDATE = 3.0
"""Seconds of an update that is timed, about, at most."""
TIMED_UPDATES = 2
"""Updates that are timed after a first one; the faster counts."""
BACKWARD = 2
"""Operations of a backward pass, in those of the forward pass."""
Run = RunConfig[BackboneConfig]


@dataclass(frozen=True)
class Estimate:
    """What a training run would take."""

    architecture: str
    vocab_size: int
    parameters: int
    needs: Needs
    """Bytes of each process at its peak."""
    available: float
    """Bytes of the device, for all processes on it."""
    sharing: int
    """Processes that share them."""
    flops_per_token: float
    """Multiplications and additions of matrix products, forward and backward, and where layers are
    recomputed forward again."""
    recompute: bool
    n_processes: int
    tokens_per_second: float
    """Of all processes together."""
    probe: str
    """What was timed."""
    steps: int
    """Updates of the run."""
    checkpoints: int
    """That are on the disk at once, at most."""
    disk: int
    """Bytes that they take."""
    tokens: int
    """That the run reads."""

    @property
    def seconds(self) -> float:
        """Of the run's updates; validations and checkpoints come on top."""
        return self.tokens / self.tokens_per_second

    def refuse_too_large(self) -> None:
        """Raise :class:`MemspanError` if the run does not fit this device."""
        self.needs.refuse_more_than(self.available, self.sharing)


def estimate(
    config: Run,
    *,
    n_processes: int = 1,
    optimiser: MakeOptimiser | None = None,
    processes: Processes = ALONE,
) -> Estimate:
    """Estimate what training would take, from counts and a probe of some seconds; nothing is written.

    The probe times a few updates of the model itself where that fits and is quick enough, otherwise of
    fewer of its rows or layers. ``docs/scaling.md`` says how good that is.

    Args:
        config: all options of the run.
        n_processes: that would share its rows. If they are not there, speed is that of one times their
            number, without the exchange of gradients.
        optimiser: as for :func:`memspan.train`.
        processes: of a distributed run, which all call this with the same arguments.

    Raises:
        MemspanError: an option that cannot be used, a vocabulary that is not known without a download,
            a model of which not even a single layer fits this device.

    Example::

        from memspan.models.transformer_xl.config import TransformerXLConfig

        found = memspan.estimate(memspan.RunConfig(model=TransformerXLConfig()))
        print(found.parameters, found.needs.total, found.seconds)
    """
    if type(n_processes) is not int or n_processes < 1:
        raise MemspanError(f"n_processes must be an integer of at least 1, not {n_processes!r}")
    n_processes = max(n_processes, processes.size)
    config = with_optimiser(config, optimiser)
    refuse_fsdp_alone(config, n_processes)
    refuse_sharing(config, Processes(0, n_processes))
    device = own_device(device_for(config.train.device))
    config = dataclasses.replace(
        config, model=config.model.for_segments(config.train.segment_length)
    )
    process = resident_bytes(device) or 0
    vocab_size = processes.in_turn(lambda: vocabulary(config.data))
    steps = processes.in_turn(lambda: updates(config))
    # First: refuses what cannot even be counted.
    whole = sizes_of(config, vocab_size, config.train.batch_size, optimiser)
    n_rows = config.train.batch_size // n_processes
    found = Sampled(None, {})
    if processes.first:
        found = sampled(config, vocab_size, n_rows, device, optimiser)
    found = processes.of_first(found)
    sharing = on_this_machine(processes.size, device)
    room = _Room(config, vocab_size, n_processes, sharing, device, found, process, optimiser)
    n_layers = config.model.n_layers
    speed, probe = _timed(room, processes)
    # By now all libraries are loaded that training needs.
    process = max(process, resident_bytes(device) or 0)
    if n_processes > processes.size:
        probe += f", times {n_processes} without the exchange of gradients"
    options = config.train
    checkpoints = options.checkpoints(steps)
    return Estimate(
        architecture=config.architecture,
        vocab_size=vocab_size,
        parameters=whole.parameters,
        needs=dataclasses.replace(room.needs(n_layers, n_rows), process=process),
        available=memory_of(device),
        sharing=sharing,
        flops_per_token=(1 + BACKWARD + options.recompute) * line(found.operations, n_layers),
        recompute=options.recompute,
        n_processes=n_processes,
        tokens_per_second=speed * (n_processes // processes.size),
        probe=probe,
        steps=steps,
        checkpoints=checkpoints,
        # At the end the shards of several processes become plain files, which then replace them.
        disk=checkpoints * whole.checkpoint * (1 if n_processes == 1 else 2),
        tokens=options.batch_size * options.tokens_read(steps),
    )


def report(found: Estimate) -> str:
    """An estimate in a few lines, for people."""
    n, needed = found.n_processes, found.needs
    parts = needed.parts()
    if needed.activations is None:
        parts += "; activations cannot be measured on this system"
    each = f" in each of {n} processes" if n > 1 else ""
    tokens = f"{counted(found.steps, 'step')}, {counted(found.tokens, 'token')}"
    return "\n".join(
        [
            f"{found.architecture}, {found.parameters:,} parameters, vocabulary {found.vocab_size:,}",
            f"memory  {in_units(needed.total)}{each} at the peak ({parts}); this device has "
            f"{in_units(found.available)}",
            f"work    {found.flops_per_token / 1e6:,.1f} million FLOPs per token in products, forward "
            f"and backward{', and forward again' if found.recompute else ''}",
            f"speed   {found.tokens_per_second:,.0f} tokens/s{f' of {n} processes' if n > 1 else ''}: "
            f"{found.probe}",
            f"disk    {in_units(found.disk)} for {counted(found.checkpoints, 'checkpoint')} at "
            "once, at most",
            f"time    {duration(found.seconds)} for {tokens}, validations and checkpoints apart",
        ]
    )


def duration(seconds: float) -> str:
    """In words: ``3.2 days``, or hours or minutes."""
    for unit, length in (("days", 86_400), ("hours", 3_600)):
        if seconds >= length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds / 60:,.1f} minutes"


def vocabulary(data: DataConfig) -> int:
    """Size of the vocabulary, without a download; as large as it may be where an option limits it.

    Raises:
        MemspanError: it would take a download to know.
    """
    if data.tokenizer == "bytes":
        return ByteTokenizer().vocab_size
    if data.tokenizer.endswith(".json"):
        return read_tokenizer(Path(os.path.expanduser(data.tokenizer))).vocab_size
    if data.vocab_size is not None:
        return data.vocab_size
    remedy = "give its size with --data.vocab-size, or "
    if data.tokenizer not in ("words", "subwords"):
        remedy = ""
    what = f"the vocabulary of {data.tokenizer} in {title(data.texts)}"
    return _prepared_here(data, what, remedy).tokenizer.vocab_size


def updates(config: Run) -> int:
    """Updates of the run, without a download.

    Raises:
        MemspanError: it would take one to know how many an epoch has.
    """
    if config.train.steps is not None:
        return config.train.steps
    row_length = 0
    if config.train.epochs is not None:
        what = f"the length of {title(config.data.texts)}, and so of an epoch,"
        prepared = _prepared_here(config.data, what, "give --train.max-tokens, or ")
        row_length = streams_of(config, prepared).row_length
    return config.train.updates(row_length)


def _prepared_here(data: DataConfig, what: str, remedy: str) -> TokenizedCorpus:
    """The text where that takes no download; ``what`` is otherwise unknown, and what would help."""
    if not is_local(data.texts):
        text = data.train or data.corpus or ""
        prepare_it = command("data", "prepare", text, "--tokenizer", data.tokenizer)
        raise MemspanError(f"{what} is not known before the text is here: {remedy}run {prepare_it}")
    return prepare(data.texts, data.tokenizer, data.vocab_size, field=data.field)


@dataclass(frozen=True)
class _Room:
    """What fits the device."""

    config: Run
    vocab_size: int
    n_processes: int
    sharing: int
    device: torch.device
    sampled: Sampled
    process: int
    optimiser: MakeOptimiser | None

    @property
    def rows(self) -> int:
        """Of each process."""
        return self.config.train.batch_size // self.n_processes

    def needs(self, n_layers: int, rows: int) -> Needs:
        """Of each process, with so many layers and rows."""
        part = shallow(self.config, n_layers)
        activations = self.sampled.activations(n_layers, rows)
        size, n, process = self.vocab_size, self.n_processes, self.process
        return needs(part, size, rows, n, activations, process, self.device, self.optimiser)

    def fits(self, n_layers: int, rows: int) -> bool:
        """Whether that many fit."""
        return self.needs(n_layers, rows).total * self.sharing <= memory_of(self.device)


def _timed(room: _Room, processes: Processes) -> tuple[float, str]:
    """Tokens per second of ``processes`` together, and what was timed for it.

    All layers and as many rows as are quick enough; where even one row is not, fewer layers.
    """
    operations = room.sampled.operations
    n_layers, all_rows, first = room.config.model.n_layers, room.rows, min(operations)

    @functools.cache
    def seconds(layers: int, rows: int) -> float:
        return _seconds_per_update(room, layers, rows, processes)

    once = seconds(first, 1)

    def is_quick(layers: int, rows: int) -> bool:
        cost = once * rows * line(operations, layers) / operations[first]
        return cost <= LONGEST_UPDATE and room.fits(layers, rows)

    rows = _most(all_rows, lambda rows: is_quick(n_layers, rows))
    rows = processes.of_first(rows)
    if rows:
        # Half as many are timed, too: what an update takes whatever its rows is not multiplied.
        sizes = {rows} if rows in (1, all_rows) else {rows // 2, rows}
        times = {n: seconds(n_layers, n) for n in sorted(sizes)}
        share = "" if rows == all_rows else f" with {rows} of its {all_rows} rows"
        probe = f"updates of the model itself{share}"
        return _per_second(room, all_rows, processes) / line(times, all_rows), probe
    # An architecture without an option for it has no fewer layers.
    fewer = n_layers if first < n_layers else 0
    layers = max(first, _most(fewer, lambda layers: is_quick(layers, 1)))
    layers = processes.of_first(layers)
    sizes = {layers} if layers == 1 else {max(first, layers // 2), layers}
    times = {n: seconds(n, 1) for n in sorted(sizes)}
    probe = f"updates of {layers} of the {n_layers} layers with 1 of {all_rows} rows, scaled"
    return _per_second(room, 1, processes) / line(times, n_layers), probe


def _most(limit: int, holds: Callable[[int], bool]) -> int:
    """The largest number up to ``limit`` for which it holds, and for all below; 0: not even for 1."""
    low, high = 0, limit
    while low < high:
        middle = -(-(low + high) // 2)
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _per_second(room: _Room, rows: int, processes: Processes) -> float:
    """Tokens of an update with so many rows in each process."""
    options = room.config.train
    return rows * processes.size * options.segment_length * options.gradient_segments


def _seconds_per_update(room: _Room, layers: int, rows: int, processes: Processes) -> float:
    """Train a few layers and rows on made-up tokens, exactly as a run does, for a few updates."""
    config, device = shallow(room.config, layers), room.device
    options = dataclasses.replace(
        config.train,
        steps=1 + TIMED_UPDATES,
        max_tokens=None,
        epochs=None,
        batch_size=rows * processes.size,
        accumulate=config.train.gradient_segments,
        accumulate_later=None,
        accumulate_from=0,
        first_segment_length=None,
        curriculum_steps=0,
    )
    config = dataclasses.replace(config, train=options)
    length = options.segment_length * options.accumulate * (TIMED_UPDATES + 2)
    tokens = made_up_tokens(room.vocab_size, options.batch_size * length + 1)
    # Only the number of words matters.
    tokenizer = WordTokenizer([str(number) for number in range(room.vocab_size)])
    text = TokenFile(tokens, np.zeros(1, np.int64), len(tokens), "words", room.vocab_size, "", "")
    prepared = TokenizedCorpus(tokenizer, {"train": text}, {})
    state = TrainingState(config, prepared, device, processes, optimiser=room.optimiser)
    updater, times = Updater(state), []
    for _ in range(1 + TIMED_UPDATES):
        processes.wait()
        start = time.perf_counter()
        updater.update()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return processes.of_first(min(times[1:]))
