"""Which options may change when a run is resumed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from memspan.data.options import TEXTS
from memspan.errors import MemspanError
from memspan.models.options import BackboneConfig
from memspan.runs.options import RunConfig

Changes = dict[str, list[object]]
"""Option, such as ``train.steps``, to its values before and after."""
FIXED = {
    "optim.optimiser": "another could not go on from what this one keeps",
    "train.batch_size": "each row of the batch has its own memory and its own position in the text",
    "train.evaluate_tokens": "the best score so far is of those tokens",
    "train.seed": "the random numbers continue from it",
}
"""Options that cannot change once training has begun, and why."""
MOVABLE = (*(f"data.{name}" for name in TEXTS), "data.field")
"""Where the text is: it may move, since its content is compared."""


def changes(before: RunConfig[BackboneConfig], after: RunConfig[BackboneConfig]) -> Changes:
    """The options that differ, in the order of the dataclasses."""
    ours, theirs = _flat(before), _flat(after)
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return {name: [ours.get(name), theirs.get(name)] for name in names}


def refuse_fixed(changed: Changes, folder: Path, begun: bool) -> None:
    """Refuse changes that would make it another run.

    Args:
        changed: the options.
        folder: the run's, for the message.
        begun: whether its training has begun; that of a converted run has not.

    Raises:
        MemspanError: names the option and why it cannot change.
    """
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


def _flat(config: RunConfig[BackboneConfig]) -> dict[str, object]:
    flat: dict[str, object] = {"architecture": config.architecture}
    for section, options in dataclasses.asdict(config).items():
        if isinstance(options, dict):
            flat |= {f"{section}.{name}": value for name, value in options.items()}
    return flat
