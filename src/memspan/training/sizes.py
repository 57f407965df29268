"""The memory that training takes: a lower bound and, for larger models, an estimate from samples."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from memspan.data.corpora import Corpus
from memspan.data.prepared import TokenizedCorpus
from memspan.data.token_files import TokenFile
from memspan.distributed.processes import ALONE, Processes
from memspan.errors import MemspanError
from memspan.models import LanguageModel
from memspan.models.options import BackboneConfig
from memspan.models.sizes import BYTES, memory_of, refuse_impossible, refuse_oversized_model
from memspan.runs.options import RunConfig
from memspan.training.optimisers import MakeOptimiser, kept_bytes
from memspan.training.state import TrainingState
from memspan.training.updates import Updater

MEASURED_FROM = 0.01
"""Share of the device's memory above which a lower bound does not show that training fits."""
PROCESS = 400_000_000
"""Bytes of Python and its libraries on a CPU, with their own allocations."""
FORMULAS = {str(operation): formula for operation, formula in flop_registry.items()}


class Tally(TorchDispatchMode):
    """Counts what PyTorch does within: operations of matrix products, and bytes of tensors.

    Products in loops in C are not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0
        """Multiplications and additions."""
        self.live = self.peak = 0
        """Bytes of tensors made within: of those alive, and the peak."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled in here, and loading the compiler takes seconds.
        return False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        # PyTorch has a formula for addmm, which holds for addmm_, too; likewise on a CPU.
        name = str(function.overloadpacket).removesuffix("_").replace("_for_cpu", "")
        if name in FORMULAS:
            self.operations += FORMULAS[name](*args, **kwargs, out_val=result)
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
class Needs:
    """Bytes that one process takes."""

    weights: int
    gradients: int
    """Twice with DDP, which collects them in buckets."""
    moments: int
    """The optimiser's state, whatever it is."""
    activations: int
    """Those of the segments that gradients flow through, forward and backward."""
    memory: int
    """The architecture's memory, before and after an update."""
    process: int
    """Python and its libraries."""
    saving: int
    """Copies of the state that several processes on a CPU make to write it during training: one of all,
    two of the part that each writes. One process copies nothing."""

    @property
    def total(self) -> int:
        """All of it together."""
        return sum(astuple(self))

    def refuse_more_than(self, available: float, n_processes: int) -> None:
        """Raise :class:`MemspanError` if this many processes do not fit a device with ``available``."""
        if self.total * n_processes > available:
            each = f" in each of {n_processes} processes" if n_processes > 1 else ""
            raise MemspanError(
                f"training would take {in_units(self.total)}{each} ({self.parts()}), and this device "
                f"has {in_units(available)}: lower batch_size, segment_length or the model's sizes, or "
                "share them with --nproc on more machines (--train.parallel fsdp)"
            )

    def parts(self) -> str:
        """Its parts and their sizes, for people."""
        return ", ".join(f"{name} {in_units(size)}" for name, size in asdict(self).items() if size)


@dataclass(frozen=True)
class Sampled:
    """Activations and operations of samples with a few layers and rows."""

    peaks: dict[int, dict[int, float]]
    """Bytes of activations, by layers, then by rows."""
    operations: dict[int, float]
    """Operations per token in the matrix products of a forward pass, by layers."""

    def activations(self, n_layers: int, rows: int) -> float:
        """Bytes with this many layers and rows: they grow linearly in both."""
        return line({n: line(by_rows, rows) for n, by_rows in self.peaks.items()}, n_layers)


def line(points: Mapping[int, float], at: int) -> float:
    """The value at ``at`` of the line through the last two ``points``, or through one and zero."""
    first, last = [0, *sorted(points)][-2:]
    low = points.get(first, 0.0)
    return low + (at - first) * max(0.0, points[last] - low) / (last - first)


@dataclass(frozen=True)
class Plan:
    """A run before it begins, and the device that it is for."""

    config: RunConfig[BackboneConfig]
    vocab_size: int
    device: torch.device
    n_processes: int = 1
    optimiser: MakeOptimiser | None = None

    @property
    def rows(self) -> int:
        """Rows of each process."""
        return self.config.train.batch_size // self.n_processes

    def with_layers(self, n_layers: int) -> Plan:
        """The same with this many layers."""
        if n_layers == self.config.model.n_layers:
            return self
        options: Any = self.config.model
        return replace(self, config=replace(self.config, model=replace(options, n_layers=n_layers)))

    def needs(self, rows: int, activations: float | None = None) -> Needs:
        """The needs of a process with this many rows, given their activations (None: a lower bound)."""
        config, n_processes, vocab_size = self.config, self.n_processes, self.vocab_size
        with torch.device("meta"), refuse_impossible("the model"):
            model = LanguageModel(vocab_size, config.model, config.embedding)
            memory = rows * model.initial_memory(1).nbytes
        own = whole = sum(p.numel() for p in model.parameters())
        moments = kept_bytes(model, config.optim, self.optimiser)
        part = (BYTES * whole + moments) // n_processes
        gathered = saving = 0
        if config.train.parallel == "fsdp" and n_processes > 1:
            # FSDP2 gathers one unit at a time, and all parameters outside of units.
            units = [sum(p.numel() for p in unit.parameters()) for unit in model.units()]
            gathered = whole - sum(units) + max(units, default=0)
            own, moments = own // n_processes, moments // n_processes
        buckets = own if config.train.parallel == "ddp" and n_processes > 1 else 0
        if n_processes > 1 and self.device.type == "cpu":
            # Fields of a memory may share tensors, so that rows are copied once more.
            saving = BYTES * own + moments + 2 * part + 4 * memory
        if activations is None:
            # The inputs of every layer and of its second half, in all segments that gradients flow
            # through; with recompute the first alone, in one segment.
            inputs = 1 if config.train.recompute else 2 * config.train.gradient_segments
            tokens = rows * config.train.segment_length
            activations = BYTES * inputs * tokens * config.model.n_layers * config.model.d_model
        return Needs(
            weights=BYTES * (own + gathered),
            gradients=BYTES * (own + buckets),
            moments=moments,
            activations=round(activations),
            memory=2 * memory,
            process=PROCESS if self.device.type == "cpu" else 0,
            saving=saving,
        )

    def updater(self, rows: int, processes: Processes = ALONE) -> Updater:
        """Trains this many rows in each process, on made-up tokens."""
        from memspan.data.tokenizers.words import WordTokenizer

        batch_size, segments = rows * processes.size, self.config.train.gradient_segments
        options = replace(self.config.train, batch_size=batch_size, accumulate=segments)
        if options.accumulate_later is not None:
            options = replace(options, accumulate_later=segments)
        # As frequent as words sorted by frequency: like 1 / (id + 1).
        count = 4 * batch_size * segments * options.segment_length
        rank = np.random.default_rng(1).random(count)
        tokens = np.expm1(rank * np.log1p(self.vocab_size)).astype(np.uint32)
        tokens = tokens.clip(max=self.vocab_size - 1)
        text = TokenFile(tokens, np.zeros(1, np.int64), count, "", "")
        # Only the number of words matters.
        tokenizer = WordTokenizer([str(number) for number in range(self.vocab_size)])
        state = TrainingState(
            replace(self.config, train=options),
            TokenizedCorpus(tokenizer, {"train": text}, Corpus({}, {})),
            self.device,
            processes,
            optimiser=self.optimiser,
        )
        # Segments have their full length by then.
        state.step = options.curriculum_steps
        return Updater(state)

    def sampled(self) -> Sampled:
        """Measure one and two layers with one and two rows, or as many as there are.

        Raises:
            MemspanError: not even a sample fits the device.
        """
        layers, counts = self._layers(), range(1, min(2, self.rows) + 1)
        largest = replace(self.with_layers(layers[-1]), n_processes=1).needs(counts[-1])
        if largest.total > memory_of(self.device):
            # Then the whole does not fit either, and the message is about that.
            whole = replace(self, n_processes=1).needs(self.rows)
            whole.refuse_more_than(memory_of(self.device), 1)
        found = Sampled({n_layers: {} for n_layers in layers}, {})
        for n_layers, rows in itertools.product(layers, counts):
            updater = self.with_layers(n_layers).updater(rows)
            state = updater.state
            for parameter in state.model.parameters():
                parameter.register_post_accumulate_grad_hook(_drop)
            # An update replaces what is in memory.
            with torch.no_grad():
                state.memory = updater.read(state.streams.next()).memory
            with Tally() as counted:
                updater.update()
            found.peaks[n_layers][rows] = counted.peak
            if rows == 1:
                found.operations[n_layers] = _operations(state)
        return found

    def _layers(self) -> list[int]:
        """Numbers of layers in samples. A single recomputed layer takes less than one that is followed
        by another, whose gradient it is given."""
        n_layers = self.config.model.n_layers
        try:
            has_fewer = self.with_layers(1).config.model.n_layers == 1
        except (TypeError, ValueError, MemspanError):
            # The architecture has no option for the number of layers.
            has_fewer = False
        least = 1 + self.config.train.recompute
        return sorted({min(least, n_layers), min(least + 1, n_layers)}) if has_fewer else [n_layers]


@torch.no_grad()
def _operations(state: TrainingState) -> float:
    """Operations per token in the products of a forward pass of the reference: those of loops in C
    cannot be counted."""
    segment = state.streams.next().part(state.rows, state.device)
    inputs, targets = segment.inputs, segment.targets
    with Tally() as counted:
        state.model.eval()(inputs, state.memory, targets=targets, implementation="reference")
    return counted.operations / inputs.numel()


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def refuse_oversized_training(plan: Plan) -> None:
    """Raise :class:`MemspanError` if training does not fit the device.

    Nothing is measured if a lower bound leaves no doubt that it fits.
    """
    config, available = plan.config, memory_of(plan.device)
    sharing = on_this_machine(plan.n_processes, plan.device)
    refuse_oversized_model(config.model, plan.vocab_size, config.embedding)
    least = plan.needs(plan.rows)
    least.refuse_more_than(available, sharing)
    if least.total - least.process > MEASURED_FROM * available:
        activations = plan.sampled().activations(config.model.n_layers, plan.rows)
        plan.needs(plan.rows, activations).refuse_more_than(available, sharing)


def on_this_machine(n_processes: int, device: torch.device) -> int:
    """How many of the processes share the device's memory."""
    if device.type != "cpu":
        return 1
    return min(n_processes, int(os.environ.get("LOCAL_WORLD_SIZE", n_processes)))


def in_units(size: float) -> str:
    """Bytes for people, such as ``1.2 GB``."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.0f} MB"
