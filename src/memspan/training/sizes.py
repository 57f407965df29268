"""The memory that training takes: a lower bound, and for larger models what a sample of it measures."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields

import torch

from memspan.errors import MemspanError
from memspan.models import LanguageModel
from memspan.models.options import BackboneConfig
from memspan.models.sizes import (
    BYTES,
    REMEDY,
    memory_of,
    parameters,
    refuse_impossible,
    refuse_oversized,
    refuse_oversized_model,
)
from memspan.runs.options import RunConfig
from memspan.training.optimisers import MakeOptimiser, kept_bytes
from memspan.training.sample import Sample, line, resident_bytes, sampled_layers, shallow

MEASURED_FROM = 0.01
"""Share of the device's memory from which on a lower bound is not enough to tell that training fits."""

ENDING = 70_000_000
"""Bytes of the compressor that the final score is compared with, for a text of up to 1 MB."""


@dataclass(frozen=True)
class Sizes:
    """Numbers of parameters and bytes, counted without allocating any."""

    parameters: int
    moments: int
    """Bytes that the optimiser keeps."""
    memory_bytes: int
    """Of the memory that the rows of one process carry."""
    gathered: int
    """Parameters that FSDP2 holds at once: its largest unit, and all that is in none."""

    @property
    def checkpoint(self) -> int:
        """Bytes of a checkpoint, if the memory is that of all rows."""
        return BYTES * self.parameters + self.moments + self.memory_bytes


def sizes_of(
    config: RunConfig[BackboneConfig],
    vocab_size: int,
    rows: int,
    optimiser: MakeOptimiser | None = None,
) -> Sizes:
    """Count a model of these options, its optimiser, and the memory of so many rows."""
    with torch.device("meta"), refuse_impossible("the model"):
        model = LanguageModel(vocab_size, config.model, config.embedding)
        memory = model.initial_memory(rows)
    count = sum(p.numel() for p in model.parameters())
    units = [sum(p.numel() for p in unit.parameters()) for unit in model.units()]
    moments = kept_bytes(model, config.optim, optimiser)
    return Sizes(count, moments, memory.nbytes, count - sum(units) + max(units, default=0))


@dataclass(frozen=True)
class Needs:
    """Bytes that one process takes."""

    weights: int
    gradients: int
    """With DDP twice: it collects them in buckets."""
    moments: int
    """Or whatever else the optimiser keeps."""
    activations: int | None
    """Of one pass forward and backward (None: cannot be measured on this system)."""
    memory: int
    """The architecture's, before and after an update."""
    process: int
    """Python and its libraries."""
    saving: int
    """On a CPU, what several processes copy of their state in order to write it while training goes on:
    one copy of all, two of the part that each writes. One process copies nothing."""
    ending: int
    """On a CPU, see :data:`ENDING`: it comes after the last save, so that only the larger counts. What
    gradients and activations took is free by then, but the system has not got it back."""

    @property
    def total(self) -> int:
        """All of it together."""
        return sum(getattr(self, field.name) or 0 for field in fields(self))

    def refuse_more_than(self, available: float, n_processes: int) -> None:
        """Raise :class:`MemspanError` if so many processes do not fit a device with ``available``."""
        if self.total * n_processes <= available:
            return
        each = f" in each of {n_processes} processes" if n_processes > 1 else ""
        raise MemspanError(
            f"training would take {in_units(self.total)}{each} ({self.parts()}), and this device has "
            f"{in_units(available)}: lower batch_size, segment_length or the model's sizes, or "
            "share them with --nproc on more machines (--train.parallel fsdp)"
        )

    def parts(self) -> str:
        """What it is made of, for people."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return ", ".join(f"{name} {in_units(size)}" for name, size in named.items() if size)


def needs(
    config: RunConfig[BackboneConfig],
    vocab_size: int,
    rows: int,
    n_processes: int,
    activations: float | None,
    process: int,
    device: torch.device,
    optimiser: MakeOptimiser | None = None,
) -> Needs:
    """What one of ``n_processes`` takes that trains ``rows`` rows, given its activations."""
    sizes = sizes_of(config, vocab_size, rows, optimiser)
    own = held = sizes.parameters
    moments = sizes.moments
    if config.train.parallel == "fsdp":
        own //= n_processes
        moments //= n_processes
        held = own + (sizes.gathered if n_processes > 1 else 0)
    buckets = config.train.parallel == "ddp" and n_processes > 1
    saving = 0
    if n_processes > 1 and device.type == "cpu":
        part = (BYTES * sizes.parameters + sizes.moments) // n_processes + sizes.memory_bytes
        # Fields of a memory may share tensors, so that rows are copied once more.
        saving = BYTES * own + moments + 2 * sizes.memory_bytes + 2 * part
    ending = ENDING if device.type == "cpu" else 0
    return Needs(
        weights=BYTES * held,
        gradients=BYTES * own * (1 + buckets),
        moments=moments,
        activations=None if activations is None else round(activations),
        memory=2 * sizes.memory_bytes,
        process=process,
        saving=saving if saving > ending else 0,
        ending=ending if ending >= saving else 0,
    )


@dataclass(frozen=True)
class Sampled:
    """What samples of one and two layers, with one and two rows, took."""

    peaks: dict[int, dict[int, float]] | None
    """Bytes of the segments that gradients flow through, gradients apart, by layers, then by rows
    (None: this system does not tell)."""
    operations: dict[int, float]
    """Per token, in the matrix products of a forward pass, by layers."""

    def activations(self, n_layers: int, rows: int) -> float | None:
        """Bytes with so many layers and rows: they grow linearly in both."""
        if self.peaks is None:
            return None
        return line({n: line(by_rows, rows) for n, by_rows in self.peaks.items()}, n_layers)


def sampled(
    config: RunConfig[BackboneConfig],
    vocab_size: int,
    rows: int,
    device: torch.device,
    optimiser: MakeOptimiser | None = None,
) -> Sampled:
    """MakeOptimiser samples of a run with so many rows in each process, and measure them.

    Raises:
        MemspanError: not even a sample fits the device.
    """
    peaks: dict[int, dict[int, float]] | None = {}
    operations: dict[int, float] = {}
    most_rows = min(2, rows)
    # A recomputed layer by itself takes less than with one after it, whose gradient it is given.
    lowest = min(2, config.model.n_layers) if config.train.recompute else 1
    for n_layers in sampled_layers(config):
        part = shallow(config, n_layers)
        inputs = least_activations(part, most_rows)
        least = needs(part, vocab_size, most_rows, 1, inputs, 0, device, optimiser)
        if least.total > memory_of(device):
            # All layers and rows do not fit either, and it is they that were asked for.
            inputs = least_activations(config, rows)
            whole = needs(config, vocab_size, rows, 1, inputs, 0, device, optimiser)
            whole.refuse_more_than(memory_of(device), 1)
        # The run's own random numbers do not depend on samples.
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            sample = Sample(part, vocab_size, device)
            # Not counted: it leaves the heap as all later passes find it.
            sample.peak_bytes(1)
            counts = range(1, most_rows + 1) if n_layers >= lowest else ()
            found = [_peak(sample, config, n, least.gradients) for n in counts]
            operations[n_layers] = sample.operations_per_token()
        if peaks is None or None in found:
            peaks = None
        elif found:
            sizes = [peak for peak in found if peak is not None]
            peaks[n_layers] = dict(enumerate(sizes, 1))
    return Sampled(peaks, operations)


def _peak(
    sample: Sample, config: RunConfig[BackboneConfig], rows: int, gradients: int
) -> float | None:
    """Bytes of all segments of ``rows`` that gradients flow through, ``gradients`` apart."""
    segments = config.train.gradient_segments
    if not config.train.recompute:
        peak = sample.peak_bytes(rows)
        return None if peak is None else float(segments * max(0, peak - gradients))
    # Layers are computed again one at a time, however many segments there are.
    counts = range(1, min(2, segments) + 1)
    return line({n: float(sample.live_bytes(rows, n)) for n in counts}, segments)


def refuse_oversized_training(
    config: RunConfig[BackboneConfig],
    vocab_size: int,
    rows: int,
    device: torch.device,
    n_processes: int = 1,
    optimiser: MakeOptimiser | None = None,
) -> None:
    """Raise :class:`MemspanError` if training ``rows`` rows in each process does not fit the device.

    Where a lower bound leaves no doubt that it fits, nothing is measured: it counts the weights, their
    gradients, and :func:`least_activations`.
    """
    refuse_oversized_model(config.model, vocab_size, config.embedding)
    weights = BYTES * parameters(config.model, vocab_size, config.embedding)
    if config.train.parallel == "ddp":
        refuse_oversized("training's weights and gradients", 2 * weights, device, REMEDY)
    inputs = least_activations(config, rows)
    refuse_oversized("training's activations", inputs, device, "lower batch_size or segment_length")
    if 2 * weights + inputs > MEASURED_FROM * memory_of(device):
        found = sampled(config, vocab_size, rows, device, optimiser)
        activations = found.activations(config.model.n_layers, rows)
        process = resident_bytes(device) or 0
        needed = needs(
            config, vocab_size, rows, n_processes, activations, process, device, optimiser
        )
        needed.refuse_more_than(memory_of(device), on_this_machine(n_processes, device))


def least_activations(config: RunConfig[BackboneConfig], rows: int) -> int:
    """A lower bound of what is saved for backward, in bytes: the two inputs of every layer, in all
    segments that gradients flow through; with ``recompute`` a layer's own, in one segment."""
    options = config.train
    tokens = rows * options.segment_length
    inputs = 1 if options.recompute else 2 * options.gradient_segments
    return BYTES * inputs * tokens * config.model.n_layers * config.model.d_model


def on_this_machine(n_processes: int, device: torch.device) -> int:
    """How many of the processes share the device's memory."""
    if device.type != "cpu":
        return 1
    return min(n_processes, int(os.environ.get("LOCAL_WORLD_SIZE", n_processes)))


def in_units(size: float) -> str:
    """Bytes for people, such as ``1.2 GB``."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.0f} MB"
