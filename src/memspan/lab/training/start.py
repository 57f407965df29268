"""Starting and resuming a run: checks and preparations before the first update."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from memspan.calls import checked
from memspan.devices import device_for
from memspan.errors import MemspanError, counted
from memspan.files.disk import path_of
from memspan.lab.data.corpora import located, missing
from memspan.lab.data.options import TEXTS, DataConfig, title
from memspan.lab.data.prepared import TokenizedCorpus, prepare
from memspan.lab.data.token_files import difference, identity, recorded
from memspan.lab.data.tokenizers.base import Tokenizer
from memspan.lab.data.tokenizers.registry import load_tokenizer
from memspan.lab.distributed.processes import ALONE, Processes, own_device
from memspan.lab.exclusive import random_numbers
from memspan.lab.invocation import command
from memspan.lab.modes import usual_modes
from memspan.lab.runs import checkpoints, history
from memspan.lab.runs.checkpoint_files import State, check_fit
from memspan.lab.runs.folder import RunLock, lock_run, run_alone
from memspan.lab.runs.options import RunConfig, load_config, to_toml
from memspan.lab.runs.run import create, load
from memspan.lab.training.changes import (
    Changes,
    changes,
    describe,
    environments_differ,
    refuse_fixed,
)
from memspan.lab.training.estimate import Plan, refuse_oversized_training
from memspan.lab.training.metrics import refuse_missing
from memspan.lab.training.optimisers import MakeOptimiser, learning_rate, with_optimiser
from memspan.lab.training.options import BUDGETS, TrainConfig
from memspan.lab.training.state import TrainingState, precision_of, refuse_sharing, streams_of
from memspan.lab.training.trainer import Checkpointer, OnStop, Trainer
from memspan.models.options import BackboneConfig


@checked
@random_numbers()
@usual_modes()
def train(
    config: RunConfig[BackboneConfig],
    folder: str | Path,
    *,
    init_from: str | Path | None = None,
    optimiser: MakeOptimiser | None = None,
    console: Console | None = None,
    processes: Processes = ALONE,
    on_stop: OnStop | None = None,
) -> Path:
    """Train a model from the start, as ``memspan train`` does.

    Ctrl-C, SIGTERM and SIGHUP end training early, with a checkpoint to resume from, where this is
    called in the main thread; so do SIGUSR1 and SIGUSR2 if the program does not handle them.

    Args:
        config: all options of the run.
        folder: a new folder for it.
        init_from: a run whose weights are taken if they fit.
        optimiser: makes the optimiser, in place of the one that ``config.optim`` names. It is called
            with groups of parameters as torch's optimisers take them: ``params``, their ``names``,
            ``weight_decay``, and ``factor``, which multiplies the learning rate; the rate itself is set
            before each step, as ``config.optim`` says. It may leave parameters out. The optimiser's
            state for each parameter must consist of tensors and numbers, which the first step checks;
            checkpoints hold it, and any numbers in its groups that change.
        console: where progress, scores and a sample are shown (None: nowhere).
        processes: of a distributed run, which all call this with the same arguments; see
            :func:`memspan.lab.distributed.processes.joined`.
        on_stop: called with the number of the signal, if one has ended training early.

    Returns:
        The run's folder, for :func:`memspan.load` or :func:`resume`.

    Raises:
        MemspanError: an option that cannot be used, a folder that is in use or holds a run, a loss
            that is not finite, a full disk.

    Example::

        config = memspan.RunConfig(TransformerXLConfig(), data=memspan.DataConfig("book.txt"))
        folder = memspan.train(config, "runs/first")
        model = memspan.load(folder).model
    """
    folder = path_of(folder)
    console = console or Console(quiet=True)
    with _refusals(folder):
        _train(config, folder, init_from, console, processes, optimiser, on_stop)
    return folder


def _train(
    config: RunConfig[BackboneConfig],
    folder: Path,
    init_from: str | Path | None,
    console: Console,
    processes: Processes,
    optimiser: MakeOptimiser | None,
    on_stop: OnStop | None,
) -> None:
    config = with_optimiser(config, optimiser)
    refuse_sharing(config, processes, begins=True)
    device = own_device(device_for(config.train.device))
    # Before anything is announced.
    if processes.first:
        refuse_missing(config.train.tracker)
    # Absolute, so that the run can be resumed from any working directory.
    config = _with_absolute_paths(config)
    prepared = _prepared(config, processes)
    for line in prepared.notices():
        console.print(line, highlight=False)
    source = None if init_from is None else load(init_from, str(device))
    sized = config.model.for_segments(config.train.segment_length)
    config = dataclasses.replace(config, model=sized)
    precision = precision_of(config.train, device)
    options = _without_auto(config.train, precision.products, precision.matmul)
    config = dataclasses.replace(config, train=options)
    _refuse_sizes(config, prepared, device, processes, optimiser)
    state = TrainingState(config, prepared, device, processes, source, optimiser)
    if state.warm_start is not None:
        console.print(state.warm_start.summary())
    # Frees its weights before training.
    del source
    with _locked(folder, processes) as lock:
        if lock is not None:
            create(lock, config, prepared.tokenizer)
        Trainer(state, Checkpointer(state, folder, lock), console).fit(on_stop)


@contextmanager
def _refusals(folder: Path) -> Iterator[None]:
    """Turn errors of the operating system into one line."""
    try:
        yield
    except BrokenPipeError:
        # The console's reader has gone.
        raise
    except OSError as error:
        which = f", {error.filename}" if error.filename else ""
        raise MemspanError(
            f"the system refused a file ({error.strerror or error}{which}): check the disk and the "
            f"permissions, then try again; everything saved in {folder} is kept"
        ) from error


@checked
@random_numbers()
@usual_modes()
def resume(
    folder: str | Path,
    *,
    config: RunConfig[BackboneConfig] | None = None,
    optimiser: MakeOptimiser | None = None,
    console: Console | None = None,
    processes: Processes = ALONE,
    on_stop: OnStop | None = None,
) -> Path:
    """Continue a run exactly where its last checkpoint left it.

    Args:
        folder: the run's folder.
        config: options to continue with (None: the run's own). Options of training and of the
            optimiser may change, as may the corpus's path and field; each change is recorded in the
            run's ``history.jsonl``. A converted run may begin with any text and optimiser.
        optimiser: the function that :func:`train` was given, if it was.
        console: as in :func:`train`, as are ``processes`` and ``on_stop``.

    Returns:
        The run's folder.

    Raises:
        MemspanError: not a run; a run that is damaged, changed, finished or being trained by another
            process; an option that cannot change.

    Example::

        config = memspan.load("runs/first").config
        more = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=5000))
        memspan.resume("runs/first", config=more)
    """
    console = console or Console(quiet=True)
    again = "--resume continues from a run's newest one (--init-from takes the weights of any)"
    with _refusals(path_of(folder)):
        folder = run_alone(folder, again)
        # Fails if this is not a run, before a folder is made for the lock.
        load_config(folder)
        with _locked(folder, processes) as lock:
            return _resume(folder, lock, console, processes, config, optimiser, on_stop)


def _resume(
    folder: Path,
    lock: RunLock | None,
    console: Console,
    processes: Processes,
    wanted: RunConfig[BackboneConfig] | None,
    optimiser: MakeOptimiser | None,
    on_stop: OnStop | None,
) -> Path:
    if lock is not None:
        lock.load()
    before = load_config(folder)
    config = before
    if wanted is not None:
        # The run's own precision stands for auto.
        own = before.train.precision, before.train.matmul_precision
        config = _with_absolute_paths(wanted, before.data)
        config = dataclasses.replace(config, train=_without_auto(config.train, *own))
    config = with_optimiser(config, optimiser)
    latest = checkpoints.latest(folder)
    state = latest.state
    changed = changes(before, config)
    # Only a converted run has no place in its text; one that stopped at step 0 has.
    _refuse_changes(changed, config, folder, begun=bool(state["streams"]))
    device = own_device(device_for(config.train.device))
    # Before anything is announced.
    if processes.first:
        refuse_missing(config.train.tracker)
    # A single process checks all of the checkpoint before the model takes memory.
    saved = latest.load() if processes.size == 1 else None
    if processes.first:
        # With the run's own options, until it is certain that it continues.
        checkpoints.recover(folder, state, before.train.keep)
    tokenizer = load_tokenizer(folder)
    prepared = _prepared(config, processes, tokenizer)
    if how := difference(recorded(state["corpus"]), identity(prepared.splits)):
        raise MemspanError(
            f"the corpus {title(config.data.texts)} is not what this run was trained on ({how}): "
            "restore its files (for python-stdlib: the same Python version), or start a new run"
        )
    _refuse_finished(state, config, prepared, folder)
    if saved is not None:
        check_fit(folder, config, tokenizer.vocab_size, saved.weights)
    _refuse_sizes(config, prepared, device, processes, optimiser)
    training = TrainingState(config, prepared, device, processes, optimiser=optimiser)
    if saved is None:
        saved = processes.in_turn(lambda: latest.load(training.target, verify=processes.first))
        check_fit(folder, config, tokenizer.vocab_size, saved.weights)
    training.restore(saved, folder)
    if training.stops_early:
        more = ("--train.early-stopping-patience", 2 * training.unimproved)
        raise MemspanError(
            f"{folder} has stopped early at step {training.step:,}: {training.patience_in_words()}; "
            f"to continue: {command('train', '--resume', folder, *more)}"
        )
    console.print(f"resuming {folder} at step {training.step:,}")
    if changed:
        _report_changes(changed, before, training, folder, console)
    if lock is not None:
        history.record(lock, training.step, changed, to_toml(config).encode())
    if line := environments_differ(saved.state.get("environment"), training.environment()):
        console.print(line)
    # As in train().
    del saved
    Trainer(training, Checkpointer(training, folder, lock), console).fit(on_stop)
    return folder


def _refuse_changes(
    changed: Changes, config: RunConfig[BackboneConfig], folder: Path, begun: bool
) -> None:
    """Refuse options that the run cannot continue with, and a corpus that is missing."""
    refuse_fixed(changed, folder, begun)
    longest = config.model.longest_segment
    segment_length = config.train.segment_length
    if "train.segment_length" in changed and longest is not None and segment_length > longest:
        raise MemspanError(
            f"{folder} has learned positions for segments of at most {longest} tokens: lower "
            f"--train.segment-length {segment_length}"
        )
    if option := missing(config.data.texts):
        raise MemspanError(
            f"the {option} text of {folder} is not at {getattr(config.data, option)}: give its new "
            f"path with --data.{option} PATH"
        )


def _refuse_finished(
    state: State, config: RunConfig[BackboneConfig], prepared: TokenizedCorpus, folder: Path
) -> None:
    """Refuse to continue if the budget allows no more updates."""
    step = state["step"]
    read = state["streams"].get("tokens_read", 0)
    steps = config.train.updates(streams_of(config, prepared).row_length, step, read)
    if step < steps:
        return
    budget = next(name for name in BUDGETS if getattr(config.train, name) is not None)
    value = getattr(config.train, budget)
    more = value * -(-2 * step // steps)
    raise MemspanError(
        f"{folder} is finished: it has made {counted(step, 'step')}, and train.{budget} is {value:,}; "
        "to continue: "
        + command("train", "--resume", folder, f"--train.{budget.replace('_', '-')}", more)
    )


def _report_changes(
    changed: Changes,
    before: RunConfig[BackboneConfig],
    training: TrainingState,
    folder: Path,
    console: Console,
) -> None:
    streams = training.streams
    steps = before.train.updates(streams.row_length, training.step, streams.tokens_read)
    old = learning_rate(training.step, before.optim, steps)
    new = learning_rate(training.step, training.config.optim, training.steps)
    rates = f"; learning rate here {old:.3g} -> {new:.3g}" if old != new else ""
    console.print(f"changed, and recorded in {folder / history.NAME}: {describe(changed)}{rates}")


def _refuse_sizes(
    config: RunConfig[BackboneConfig],
    prepared: TokenizedCorpus,
    device: torch.device,
    processes: Processes,
    optimiser: MakeOptimiser | None,
) -> None:
    """Refuse a batch that processes cannot share or the text cannot fill, and runs that do not fit."""
    refuse_sharing(config, processes)
    streams_of(config, prepared)
    vocab_size = prepared.tokenizer.vocab_size
    refuse_oversized_training(Plan(config, vocab_size, device, processes.size, optimiser))


def _without_auto(options: TrainConfig, precision: str, matmul_precision: str) -> TrainConfig:
    """The options with ``auto`` replaced by what the run uses, so that it resumes the same anywhere."""
    used: dict[str, Any] = {"precision": precision, "matmul_precision": matmul_precision}
    left_open = {name: used[name] for name in used if getattr(options, name) == "auto"}
    return dataclasses.replace(options, **left_open)


def _with_absolute_paths(
    config: RunConfig[BackboneConfig], but: DataConfig | None = None
) -> RunConfig[BackboneConfig]:
    """``config`` with the paths of its texts and tokeniser absolute, except those that ``but`` has."""
    data = config.data
    found = dict[str, Any]()
    for name in TEXTS:
        if (path := getattr(data, name)) is not None:
            found[name] = located(path)
    if data.tokenizer.endswith(".json"):
        found["tokenizer"] = os.path.abspath(path_of(data.tokenizer))
    found = {n: path for n, path in found.items() if getattr(data, n) != getattr(but, n, None)}
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **found))


def _prepared(
    config: RunConfig[BackboneConfig], processes: Processes, tokenizer: Tokenizer | None = None
) -> TokenizedCorpus:
    data = config.data
    prepared = processes.in_turn(
        lambda: prepare(
            data.texts,
            data.tokenizer,
            data.vocab_size,
            field=data.field,
            with_tokenizer=tokenizer,
        )
    )
    for split, use in {"train": "train on", "validation": "validate with"}.items():
        if split not in prepared.splits:
            raise MemspanError(f"{title(data.texts)} has no text to {use}: choose another corpus")
    return prepared


def _locked(folder: Path, processes: Processes) -> AbstractContextManager[RunLock | None]:
    return lock_run(folder) if processes.first else nullcontext()
