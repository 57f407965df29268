"""What a run would take: ``memspan train --dry-run``, and the refusal of what does not fit."""

from __future__ import annotations

import os
import time
import weakref
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from rich.filesize import decimal
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memspan.calls import checked
from memspan.devices import device_for
from memspan.errors import MemspanError, counted
from memspan.lab.data.corpora import Corpus, is_local
from memspan.lab.data.options import title
from memspan.lab.data.prepared import TokenizedCorpus, prepare
from memspan.lab.data.token_files import TokenFile
from memspan.lab.data.tokenizers.plain import WordTokenizer
from memspan.lab.distributed.processes import ALONE, Processes, own_device
from memspan.lab.exclusive import random_numbers
from memspan.lab.invocation import command
from memspan.lab.modes import usual_modes
from memspan.lab.runs.options import RunConfig
from memspan.lab.training.optimisers import MakeOptimiser, kept_bytes, with_optimiser
from memspan.lab.training.state import TrainingState, refuse_sharing, streams_of
from memspan.lab.training.updates import Updater
from memspan.models import LanguageModel
from memspan.models.options import BackboneConfig
from memspan.models.sizes import BYTES, memory_of, refuse_impossible, refuse_oversized_model

PROCESS = 400_000_000
"""Bytes of Python and its libraries on a CPU, with their own allocations."""
LONGEST_UPDATE = 3.0
"""About the longest update of the whole model that is timed, in seconds."""
Run = RunConfig[BackboneConfig]


class Tally(TorchDispatchMode):
    """Counts the bytes of tensors made within: those alive, and the peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled in here, and loading the compiler takes seconds.
        return False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **kwargs or {})
        # Views and tensors changed in place share storages that were there before.
        made, given = _storages(result), _storages((args, kwargs))
        for storage in (made[key] for key in made.keys() - given.keys()):
            self.live += storage.nbytes()
            weakref.finalize(storage, self._freed, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def _freed(self, size: int) -> None:
        self.live -= size


def _storages(values: Any) -> dict[int, torch.UntypedStorage]:
    found = (t.untyped_storage() for t in tree_leaves(values) if isinstance(t, Tensor))
    return {storage._cdata: storage for storage in found}


@dataclass(frozen=True)
class Plan:
    """A run before it begins, and the device that it is for."""

    config: Run
    vocab_size: int
    device: torch.device
    n_processes: int = 1
    optimiser: MakeOptimiser | None = None

    @property
    def rows(self) -> int:
        """Rows of each process."""
        return self.config.train.batch_size // self.n_processes

    @property
    def available(self) -> int:
        """Bytes of the device for each process; those on one machine share its memory."""
        here = os.environ.get("LOCAL_WORLD_SIZE", 1) if self.device.type == "cpu" else 1
        return int(memory_of(self.device) / int(here))

    def needs(self, activations: float | None = None) -> dict[str, int]:
        """Bytes that each process takes for what, given its activations (None: a lower bound)."""
        config, options, n = self.config, self.config.train, self.n_processes
        with torch.device("meta"), refuse_impossible("the model"):
            model = LanguageModel(self.vocab_size, config.model, config.embedding)
            memory = self.rows * model.initial_memory(1).nbytes
        own = whole = BYTES * sum(p.numel() for p in model.parameters())
        moments = kept_bytes(model, config.optim, self.optimiser)
        part, gathered = (whole + moments) // n, 0
        if options.parallel == "fsdp" and n > 1:
            # FSDP2 gathers one unit at a time, and all parameters outside of units.
            units = [BYTES * sum(p.numel() for p in unit.parameters()) for unit in model.units()]
            gathered = whole - sum(units) + max(units, default=0)
            own, moments = own // n, moments // n
        if activations is None:
            inputs_of_layers = self.rows * config.model.n_layers * config.model.d_model
            activations = BYTES * options.segment_length * inputs_of_layers
        found = {
            "weights": own + gathered,
            # DDP collects them in buckets.
            "gradients": own * (2 if options.parallel == "ddp" and n > 1 else 1),
            "moments": moments,
            "activations": round(activations),
            # Before and after an update.
            "memory": 2 * memory,
        }
        if self.device.type == "cpu":
            found["process"] = PROCESS
            if n > 1:
                # Copies: all state; memory again, whose fields may share tensors; a part twice.
                found["saving"] = own + moments + 4 * memory + 2 * part
        return found

    def refuse(self, needs: dict[str, int]) -> None:
        """Raise :class:`MemspanError` if processes that need so much do not fit the device."""
        if sum(needs.values()) > self.available:
            raise MemspanError(
                f"training would take {_in_words(needs)} in each process, and this device has "
                f"{decimal(self.available)} for it: lower batch_size, segment_length or the model's "
                "sizes, or share them with --nproc on more machines (--train.parallel fsdp)"
            )

    def sample(self, rows: int, processes: Processes = ALONE) -> Updater:
        """Build a trainer for ``rows`` rows per process on synthetic tokens, if they fit."""
        n, n_rows = self.config.train.gradient_segments, rows * processes.size
        options = replace(self.config.train, batch_size=n_rows, accumulate=n, accumulate_later=n)
        config = replace(self.config, train=options)
        plan = replace(self, config=config, n_processes=processes.size)
        plan.refuse(plan.needs())
        # As frequent as words sorted by frequency: like 1 / (id + 1).
        rank = np.random.default_rng(1).random(4 * n * n_rows * options.segment_length)
        tokens = np.expm1(rank * np.log1p(self.vocab_size)).clip(max=self.vocab_size - 1)
        starts = np.zeros(1, np.int64)
        text = TokenFile(tokens.astype(np.uint32), starts, len(tokens), "", "")
        # Only the number of words matters.
        words = WordTokenizer([str(number) for number in range(self.vocab_size)])
        prepared = TokenizedCorpus(words, {"train": text}, Corpus({}, {}))
        state = TrainingState(config, prepared, self.device, processes, optimiser=self.optimiser)
        # Segments have their full length by then.
        state.step = options.curriculum_steps
        return Updater(state)

    def activations_and_seconds(self) -> tuple[float, float]:
        """Bytes and duration of an update in each process, linear in rows: from samples of few."""
        few = min(2, self.rows)
        one, more = (_sampled(self.sample(rows)) for rows in (1, few))
        found = more + (self.rows - few) * np.maximum(0.0, more - one)
        return found[0].item(), found[1].item()


def _sampled(updater: Updater) -> np.ndarray:
    """Bytes of tensors, but for gradients, and seconds of an update."""
    for parameter in updater.state.model.parameters():
        parameter.register_post_accumulate_grad_hook(_drop)
    # An update replaces what is in memory.
    with torch.no_grad():
        updater.state.memory = updater.read(updater.state.streams.next()).memory
    with Tally() as tally:
        seconds = _seconds(updater)
    return np.array([tally.peak, seconds])


def _seconds(updater: Updater) -> float:
    updater.state.processes.wait()
    start = time.perf_counter()
    updater.update()
    return time.perf_counter() - start


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def refuse_oversized_training(plan: Plan) -> None:
    """Raise :class:`MemspanError` if training does not fit the device."""
    refuse_oversized_model(plan.config.model, plan.vocab_size, plan.config.embedding)
    least = plan.needs()
    plan.refuse(least)
    # Far below what there is, the lower bound leaves no doubt.
    if sum(least.values()) - least.get("process", 0) > 0.01 * plan.available:
        plan.refuse(plan.needs(plan.activations_and_seconds()[0]))


@dataclass(frozen=True)
class Estimate:
    """What a training run would take."""

    plan: Plan
    parameters: int
    needs: dict[str, int]
    """Bytes of each process at its peak, by what takes them."""
    tokens_per_second: float
    """Speed of all processes together."""
    probe: str
    """What was timed."""
    steps: int
    seconds: float
    """Duration of the run's updates; validations and checkpoints come on top."""
    disk: int
    """Bytes of the checkpoints that are there at once, at most."""

    def __str__(self) -> str:
        plan = self.plan
        return (
            f"{plan.config.architecture}, {self.parameters:,} parameters, vocabulary "
            f"{plan.vocab_size:,}\nmemory  {_in_words(self.needs)} in each process; this device has "
            f"{decimal(plan.available)} for it\nspeed   {self.tokens_per_second:,.0f} tokens/s: "
            f"{self.probe}\ndisk    {decimal(self.disk)} of checkpoints at once, at most\n"
            f"time    {self.seconds / 3600:,.2f} hours for {counted(self.steps, 'step')}, "
            "validations and checkpoints apart"
        )


def _in_words(needs: dict[str, int]) -> str:
    parts = ", ".join(f"{name} {decimal(size)}" for name, size in needs.items())
    return f"{decimal(sum(needs.values()))} ({parts})"


@checked
@random_numbers()
@usual_modes()
def estimate(
    config: Run,
    *,
    n_processes: int = 1,
    optimiser: MakeOptimiser | None = None,
    processes: Processes = ALONE,
) -> Estimate:
    """Estimate what training would take, from counts and a probe of some seconds; nothing is written.

    Printing it shows all in a few lines; ``docs/scaling.md`` says how it is found, and how good it is.

    Args:
        config: all options of the run.
        n_processes: processes that would share its rows. If this is run in one, its speed is multiplied
            by their number, without the exchange of gradients.
        optimiser: as for :func:`memspan.train`.
        processes: of a distributed run, which all call this with the same arguments.

    Raises:
        MemspanError: an option that cannot be used, a vocabulary or an epoch that is not known without
            a download, a model that does not fit this device even with a single row.
    """
    n_processes = max(n_processes, processes.size)
    config = with_optimiser(config, optimiser)
    refuse_sharing(config, Processes(0, n_processes), begins=True)
    device, options = own_device(device_for(config.train.device)), config.train
    config = replace(config, model=config.model.for_segments(options.segment_length))
    vocab_size, steps = processes.in_turn(lambda: _vocabulary_and_steps(config))
    plan = Plan(config, vocab_size, device, n_processes, optimiser)
    activations, seconds = processes.of_first(plan.activations_and_seconds())
    needs, probe = plan.needs(activations), "updates of one and two rows, extrapolated"
    if seconds <= LONGEST_UPDATE and sum(needs.values()) <= plan.available:
        updater, probe = plan.sample(plan.rows, processes), "updates of the model itself"
        seconds = processes.of_first(min(_seconds(updater) for _ in range(3)))
    if n_processes > processes.size:
        probe += f", times {n_processes} without the exchange of gradients"
    whole = replace(plan, n_processes=1).needs()
    checkpoint = whole["weights"] + whole["moments"] + whole["memory"] // 2
    speed = options.batch_size * options.segment_length * options.gradient_segments / seconds
    return Estimate(
        plan,
        parameters=whole["weights"] // BYTES,
        needs=needs,
        tokens_per_second=speed,
        probe=probe,
        steps=steps,
        seconds=options.batch_size * options.tokens_read(steps) / speed,
        # At the end the shards of several processes become plain files, which then replace them.
        disk=options.checkpoints(steps) * min(n_processes, 2) * checkpoint,
    )


def _vocabulary_and_steps(config: Run) -> tuple[int, int]:
    """Size of the vocabulary, as large as it may be, and updates of the run, without a download."""
    data, options = config.data, config.train
    vocab_size = 256 if data.tokenizer == "bytes" else data.vocab_size
    if vocab_size is not None and options.epochs is None:
        return vocab_size, options.updates(0)
    if not is_local(data.texts):
        raise MemspanError(
            f"the vocabulary or the length of an epoch is not known before {title(data.texts)} is "
            f"here: give --data.vocab-size and --train.max-tokens, or run "
            f"{command('data', 'prepare', data.corpus or 'TEXT', '--tokenizer', data.tokenizer)}"
        )
    prepared = prepare(data.texts, data.tokenizer, data.vocab_size, field=data.field)
    vocab_size = vocab_size or prepared.tokenizer.vocab_size
    return vocab_size, options.updates(streams_of(config, prepared).row_length)
