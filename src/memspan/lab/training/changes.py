"""Changes between a run and its resumption: of options, and of the environment that rounds sums."""

from __future__ import annotations

import dataclasses
import json
import platform
from pathlib import Path

import torch

from memspan import __version__
from memspan.errors import MemspanError
from memspan.lab.data.options import TEXTS
from memspan.lab.runs.options import RunConfig
from memspan.models import LanguageModel
from memspan.models.options import BackboneConfig
from memspan.precision import Precision

Changes = dict[str, list[object]]
"""Maps an option, such as ``train.steps``, to its values before and after."""
FIXED = {
    "optim.optimiser": "another could not continue from what this one keeps",
    "train.batch_size": "each row of the batch has its own memory and its own position in the text",
    "train.evaluate_tokens": "the best score so far is of those tokens",
    "train.seed": "the random numbers continue from it",
}
"""Options that cannot change once training has begun, and why."""
MOVABLE = (*(f"data.{name}" for name in TEXTS), "data.field")
"""Options that say where the text is: it may move, since its content is compared."""


def changes(before: RunConfig[BackboneConfig], after: RunConfig[BackboneConfig]) -> Changes:
    """The options that differ, in the order of the dataclasses."""
    ours = _flat(before)
    theirs = _flat(after)
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return {name: [ours.get(name), theirs.get(name)] for name in names}


def refuse_fixed(changed: Changes, folder: Path, begun: bool) -> None:
    """Refuse changes that would make it another run; ``begun``: it was trained, not just converted."""
    for name, (before, after) in changed.items():
        section, _, option = name.partition(".")
        why = FIXED.get(name) if begun else None
        may_change = name in MOVABLE or (name == "data.document_reset" and not begun)
        if section not in ("optim", "train") and not may_change:
            why = "model, tokeniser and data make the run what it is"
        if why:
            flag = f"--{section}.{option.replace('_', '-')}" if option else "--model"
            raise MemspanError(
                f"{flag} cannot change from {before} to {after} when {folder} is resumed, because {why}"
                f": drop it, or start a new run (--init-from {folder} takes the weights that fit)"
            )


def describe(changed: Changes) -> str:
    """``train.steps 1000 -> 5000, ...``."""
    return ", ".join(f"{name} {before} -> {after}" for name, (before, after) in changed.items())


def environment(
    model: LanguageModel, device: torch.device, precision: Precision, n_processes: int
) -> dict[str, object]:
    """Versions, devices and settings that rounding depends on, as JSON values: saved with the state."""
    on_gpu = device.type == "cuda"
    return {
        "memspan": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if on_gpu else device.type,
        "processor": _processor(),
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "processes": n_processes,
        "compiled loops": model.backbone.compiled_loops(),
        "precision": precision.products,
        "float32 products": precision.matmul,
    }


def environments_differ(saved: object, now: dict[str, object]) -> str | None:
    """Describe in one line the differences and their effect; None if there are none on record."""
    if not isinstance(saved, dict):
        return None
    # Quoted as JSON: text from a file may contain escape sequences for the terminal.
    changed = [
        f"{name} {json.dumps(saved[name])}, now {json.dumps(value)}"
        for name, value in now.items()
        if name in saved and saved[name] != value
    ]
    if not changed:
        return None
    return (
        f"the last checkpoint was made in another environment ({'; '.join(changed)}): the run goes on "
        "from the same state, but sums may be rounded differently, so its weights may differ from "
        "those of an uninterrupted run"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _flat(config: RunConfig[BackboneConfig]) -> dict[str, object]:
    flat: dict[str, object] = {"architecture": config.architecture}
    for section, options in dataclasses.asdict(config).items():
        if isinstance(options, dict):
            flat |= {f"{section}.{name}": value for name, value in options.items()}
    return flat
