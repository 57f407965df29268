"""Memory and time of a run before it begins: ``memspan train --dry-run``, and runs that do not fit."""

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
from memspan.cores import cores
from memspan.devices import device_for
from memspan.errors import MemspanError, counted
from memspan.lab.data.corpora import Corpus, is_local
from memspan.lab.data.options import title
from memspan.lab.data.prepared import TokenizedCorpus, prepare
from memspan.lab.data.token_files import TokenFile
from memspan.lab.data.tokenizers.plain import WordTokenizer
from memspan.lab.distributed.processes import Processes
from memspan.lab.exclusive import random_numbers
from memspan.lab.invocation import command
from memspan.lab.modes import usual_modes
from memspan.lab.runs.options import RunConfig
from memspan.lab.training.optimisers import MakeOptimiser, with_optimiser
from memspan.lab.training.state import TrainingState, refuse_sharing, streams_of
from memspan.lab.training.updates import Updater
from memspan.models import LanguageModel
from memspan.models.options import BackboneConfig
from memspan.models.sizes import BYTES, memory_of, refuse_impossible, refuse_oversized_model

PROCESS = 400_000_000
"""Bytes of Python and its libraries on a CPU, with their own allocations."""
FEW = 4
"""Rows that are tried, if the run has as many."""
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
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        made = {s._cdata: s for t in _tensors(result) if (s := t.untyped_storage())}
        for key in made.keys() - given:
            self._count(made[key].nbytes())
            weakref.finalize(made[key], self._count, -made[key].nbytes())
        return result

    def _count(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


@dataclass(frozen=True)
class Plan:
    """A run that has not begun, and its device."""

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
        # More processes than cores are for another machine.
        here = self.n_processes if self.n_processes <= cores() else 1
        here = int(os.environ.get("LOCAL_WORLD_SIZE", here)) if self.device.type == "cpu" else 1
        return int(memory_of(self.device) / here)

    def needs(self, trial: Trial | None = None) -> dict[str, int]:
        """Bytes that each process needs, by use (no ``trial``: a lower bound)."""
        options = self.config.train
        with torch.device("meta"), refuse_impossible("the model"):
            model = LanguageModel(self.vocab_size, self.config.model, self.config.embedding)
            memory = self.rows * model.initial_memory(1).nbytes
        weights = BYTES * sum(p.numel() for p in model.parameters())
        share = self.n_processes if options.parallel == "fsdp" else 1
        if trial is None:
            inputs_of_layers = self.config.model.n_layers * self.config.model.d_model
            trial = Trial(1, 0, BYTES * options.segment_length * inputs_of_layers, 0.0)
        return {
            "weights": weights // share,
            # DDP collects them in buckets.
            "gradients": weights // share * (2 if self.n_processes > share else 1),
            "moments": trial.moments // share,
            "activations": trial.activations * self.rows // trial.rows,
            # Before and after an update.
            "memory": 2 * memory,
            "process": PROCESS if self.device.type == "cpu" else 0,
        }

    def refuse(self, needs: dict[str, int]) -> None:
        """Raise :class:`MemspanError` if processes with these needs do not fit the device."""
        if sum(needs.values()) > self.available:
            raise MemspanError(
                f"training would take {_in_words(needs)} in each process, and this device has "
                f"{decimal(self.available)} for it: lower batch_size, segment_length or the model's "
                "sizes, or share them with --nproc on more machines (--train.parallel fsdp)"
            )

    def trial(self) -> Trial:
        """Train with a few rows, if these fit, on synthetic tokens."""
        rows = min(FEW, self.rows)
        segments = self.config.train.gradient_segments
        options = replace(
            self.config.train, batch_size=rows, accumulate=segments, accumulate_later=segments
        )
        plan = replace(self, config=replace(self.config, train=options), n_processes=1)
        plan.refuse(plan.needs())
        # As frequent as words sorted by frequency: like 1 / (id + 1).
        rank = np.random.default_rng(1).random(5 * segments * rows * options.segment_length)
        tokens = np.expm1(rank * np.log1p(self.vocab_size)).clip(max=self.vocab_size - 1)
        text = TokenFile(tokens.astype(np.uint32), np.zeros(1, np.int64), len(tokens), "", "")
        # Only the number of words matters.
        words = WordTokenizer([str(number) for number in range(self.vocab_size)])
        prepared = TokenizedCorpus(words, {"train": text}, Corpus({}, {}))
        state = TrainingState(plan.config, prepared, self.device, optimiser=self.optimiser)
        # Segments have their full length by then.
        state.step = options.curriculum_steps
        updater = Updater(state)
        updater.update()
        start = time.perf_counter()
        updater.update()
        seconds = time.perf_counter() - start
        for parameter in state.model.parameters():
            parameter.register_post_accumulate_grad_hook(_drop)
        with Tally() as tally:
            updater.update()
        return Trial(rows, state.optimiser.kept_bytes(), tally.peak, seconds)


@dataclass(frozen=True)
class Trial:
    """Memory and time of updates of a few rows."""

    rows: int
    moments: int
    """Bytes that the optimiser keeps."""
    activations: int
    """Bytes of tensors at the peak of an update, gradients of weights apart."""
    seconds: float
    """Duration of an update."""


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def refuse_oversized_training(plan: Plan) -> None:
    """Raise :class:`MemspanError` if training does not fit the device."""
    refuse_oversized_model(plan.config.model, plan.vocab_size, plan.config.embedding)
    least = plan.needs()
    plan.refuse(least)
    # Far below what there is, the lower bound leaves no doubt.
    if sum(least.values()) - least["process"] > 0.01 * plan.available:
        plan.refuse(plan.needs(plan.trial()))


@dataclass(frozen=True)
class Estimate:
    """Memory, time and disk space that a training run would take."""

    plan: Plan
    parameters: int
    needs: dict[str, int]
    """Bytes of each process at its peak, by use."""
    tokens_per_second: float
    """Speed of all processes together."""
    probe: str
    """The updates that were timed, in words."""
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
    config: Run, *, n_processes: int = 1, optimiser: MakeOptimiser | None = None
) -> Estimate:
    """Estimate the memory, time and disk space of training from a few updates of few rows.

    Nothing is written. ``str()`` of the result describes it in a few lines; ``docs/scaling.md`` says
    how it is found, and how accurate it is.

    Args:
        config: all options of the run.
        n_processes: processes that would share its rows. The speed of one is multiplied by their
            number, without the exchange of gradients.
        optimiser: as for :func:`memspan.train`.

    Raises:
        MemspanError: an option that cannot be used; a vocabulary or an epoch that is not known without
            a download; a model that does not fit this device even with a few rows.
    """
    config = with_optimiser(config, optimiser)
    refuse_sharing(config, Processes(0, n_processes), begins=True)
    options = config.train
    config = replace(config, model=config.model.for_segments(options.segment_length))
    vocab_size, steps = _vocabulary_and_steps(config)
    plan = Plan(config, vocab_size, device_for(options.device), n_processes, optimiser)
    trial = plan.trial()
    probe = f"updates of {counted(trial.rows, 'row')}"
    if n_processes > 1:
        probe += f", times {n_processes} without the exchange of gradients"
    whole = replace(plan, n_processes=1).needs(trial)
    checkpoint = whole["weights"] + whole["moments"] + whole["memory"] // 2
    read = trial.rows * options.segment_length * options.gradient_segments
    speed = n_processes * read / trial.seconds
    return Estimate(
        plan,
        parameters=whole["weights"] // BYTES,
        needs=plan.needs(trial),
        tokens_per_second=speed,
        probe=probe,
        steps=steps,
        seconds=options.batch_size * options.tokens_read(steps) / speed,
        # At the end the shards of several processes become plain files, which then replace them.
        disk=options.checkpoints(steps) * min(n_processes, 2) * checkpoint,
    )


def _vocabulary_and_steps(config: Run) -> tuple[int, int]:
    """Size of the vocabulary, at most, and number of updates, without a download."""
    data = config.data
    options = config.train
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
