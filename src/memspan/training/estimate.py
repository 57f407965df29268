"""What a run would take, before it allocates anything: ``memspan train --dry-run``."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from memspan.data.corpora import is_local
from memspan.data.options import DataConfig, title
from memspan.data.prepared import TokenizedCorpus, prepare
from memspan.data.tokenizers.bytes import ByteTokenizer
from memspan.data.tokenizers.registry import read_tokenizer
from memspan.devices import device_for
from memspan.distributed.processes import ALONE, Processes, own_device
from memspan.errors import MemspanError, counted
from memspan.invocation import command
from memspan.models.options import BackboneConfig
from memspan.models.sizes import BYTES, memory_of
from memspan.runs.options import RunConfig
from memspan.training.optimisers import MakeOptimiser, with_optimiser
from memspan.training.sizes import Needs, Plan, Sampled, in_units, line, on_this_machine
from memspan.training.start import refuse_fsdp_alone
from memspan.training.state import refuse_sharing, streams_of
from memspan.training.updates import Updater

LONGEST_UPDATE = 3.0
"""About the longest update that is timed, in seconds."""
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
    """Processes that share the device."""
    flops_per_token: float
    """Multiplications and additions of matrix products, forward and backward, and where layers are
    recomputed forward again."""
    recompute: bool
    n_processes: int
    tokens_per_second: float
    """Speed of all processes together."""
    probe: str
    """What was timed."""
    steps: int
    """Updates of the run."""
    checkpoints: int
    """Maximum number on the disk at once."""
    disk: int
    """Bytes that these take."""
    tokens: int
    """Tokens that the run reads."""

    @property
    def seconds(self) -> float:
        """Duration of the run's updates; validations and checkpoints come on top."""
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
        n_processes: processes that would share its rows. If this is run in one, its speed is multiplied
            by their number, without the exchange of gradients.
        optimiser: as for :func:`memspan.train`.
        processes: of a distributed run, which all call this with the same arguments.

    Raises:
        MemspanError: an option that cannot be used, a vocabulary that is not known without a download,
            a model so large that not even a few of its layers fit this device.

    Example::

        found = memspan.estimate(memspan.load("shakespeare").config)
        print(found.parameters, found.needs.total, found.seconds)
    """
    if type(n_processes) is not int or n_processes < 1:
        raise MemspanError(f"n_processes must be an integer of at least 1, not {n_processes!r}")
    n_processes = max(n_processes, processes.size)
    config = with_optimiser(config, optimiser)
    refuse_fsdp_alone(config, n_processes)
    refuse_sharing(config, Processes(0, n_processes))
    device, options = own_device(device_for(config.train.device)), config.train
    config = replace(config, model=config.model.for_segments(options.segment_length))
    vocab_size = processes.in_turn(lambda: vocabulary(config.data))
    steps = processes.in_turn(lambda: updates(config))
    plan = Plan(config, vocab_size, device, n_processes, optimiser)
    # First: refuses what cannot even be counted.
    whole = replace(plan, n_processes=1).needs(options.batch_size)
    found = processes.of_first(plan.sampled() if processes.first else Sampled({}, {}))
    seconds, probe = _timed(plan, found, processes)
    if n_processes > processes.size:
        probe += f", times {n_processes} without the exchange of gradients"
    n_tokens = options.batch_size * options.segment_length * options.gradient_segments
    one = whole.weights + whole.moments + whole.memory // 2
    n_layers, checkpoints = config.model.n_layers, options.checkpoints(steps)
    return Estimate(
        architecture=config.architecture,
        vocab_size=vocab_size,
        parameters=whole.weights // BYTES,
        needs=plan.needs(plan.rows, found.activations(n_layers, plan.rows)),
        available=memory_of(device),
        sharing=on_this_machine(processes.size, device),
        # A backward pass takes twice a forward one's.
        flops_per_token=(3 + options.recompute) * line(found.operations, n_layers),
        recompute=options.recompute,
        n_processes=n_processes,
        tokens_per_second=n_tokens / seconds,
        probe=probe,
        steps=steps,
        checkpoints=checkpoints,
        # At the end the shards of several processes become plain files, which then replace them.
        disk=checkpoints * min(n_processes, 2) * one,
        tokens=options.batch_size * options.tokens_read(steps),
    )


def _timed(plan: Plan, found: Sampled, processes: Processes) -> tuple[float, str]:
    """Seconds of an update of all layers, rows and timed segments, and what was timed for it."""
    n_layers, n_rows = plan.config.model.n_layers, plan.rows
    available = memory_of(plan.device) / on_this_machine(processes.size, plan.device)

    def seconds(layers: int, rows: int) -> float:
        return _seconds(plan.with_layers(layers).updater(rows, processes))

    def is_quick(rows: int, expected: float) -> bool:
        total = plan.needs(rows, found.activations(n_layers, rows)).total
        return processes.of_first(expected <= LONGEST_UPDATE and total <= available)

    least, most = min(found.operations), max(found.operations)
    times = {least: seconds(least, 1)}
    expected = times[least] * line(found.operations, n_layers) / found.operations[least]
    if n_layers > most and not is_quick(1, expected):
        times[most] = seconds(most, 1)
        probe = f"updates of {most} of the {n_layers} layers with 1 of {n_rows} rows, scaled"
        return n_rows * line(times, n_layers), probe
    rows, times = 1, {1: seconds(n_layers, 1)}
    # The constant part of an update is in both times, and so is not multiplied.
    while rows < n_rows and is_quick(more := min(2 * rows, n_rows), line(times, more)):
        rows, times[more] = more, seconds(n_layers, more)
    share = "" if rows == n_rows else f" with {rows} of its {n_rows} rows"
    return line(times, n_rows), f"updates of the model itself{share}"


def _seconds(updater: Updater) -> float:
    """Duration of an update: the faster of two after a first one."""
    processes, device, times = updater.state.processes, updater.state.device, []
    for _ in range(3):
        processes.wait()
        start = time.perf_counter()
        updater.update()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return processes.of_first(min(times[1:]))


def report(found: Estimate) -> str:
    """An estimate in a few lines, for people."""
    n, needed = found.n_processes, found.needs
    each = f" in each of {n} processes" if n > 1 else ""
    tokens = f"{counted(found.steps, 'step')}, {counted(found.tokens, 'token')}"
    return "\n".join(
        [
            f"{found.architecture}, {found.parameters:,} parameters, vocabulary {found.vocab_size:,}",
            f"memory  {in_units(needed.total)}{each} at the peak ({needed.parts()}); this device has "
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
    """A duration in days, hours or minutes, such as ``3.2 days``."""
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
    what = f"the vocabulary of {data.tokenizer} in {title(data.texts)}"
    sized = data.tokenizer in ("words", "subwords")
    remedy = "give its size with --data.vocab-size, or " if sized else ""
    return _prepared_here(data, what, remedy).tokenizer.vocab_size


def updates(config: Run) -> int:
    """Updates of the run, without a download.

    Raises:
        MemspanError: it would take one to know how many an epoch has.
    """
    if config.train.epochs is None:
        return config.train.updates(0)
    what = f"the length of {title(config.data.texts)}, and so of an epoch,"
    prepared = _prepared_here(config.data, what, "give --train.max-tokens, or ")
    return config.train.updates(streams_of(config, prepared).row_length)


def _prepared_here(data: DataConfig, what: str, remedy: str) -> TokenizedCorpus:
    """The text, if it needs no download; otherwise ``what`` is unknown, and ``remedy`` helps."""
    if not is_local(data.texts):
        text = data.train or data.corpus or ""
        prepare_it = command("data", "prepare", text, "--tokenizer", data.tokenizer)
        raise MemspanError(f"{what} is not known before the text is here: {remedy}run {prepare_it}")
    return prepare(data.texts, data.tokenizer, data.vocab_size, field=data.field)
