"""A script that shows a broken law."""

from __future__ import annotations

import re
from typing import Any

from memspan.stateful.floor import Reference
from memspan.stateful.protocol import Reproduces, Stateful
from memspan.stateful.reading import Named, Reading

_FUNCTIONS = (
    "start",
    "read",
    "select",
    "copy",
    "reset",
    "truncate",
    "save",
    "load",
    "read_padded",
    "read_packed",
    "module",
)


def script(
    model: Stateful[Any], reading: Reading, pair: tuple[Named, Named], within: Reference
) -> str:
    """Python that does what ``reading`` did and prints by how much ``pair`` differs.

    Without memspan if the model :class:`~memspan.stateful.protocol.Reproduces`; otherwise ``model`` has
    to be defined first, as it was given to be checked.
    """
    expected, seen = (each.text for each in pair)
    lines = _needed(reading.lines, f"{expected} {seen}")
    text = "\n".join(lines)
    used = [name for name in _FUNCTIONS if re.search(rf"\b{name}\b", text)]
    head = ["import torch"]
    if "Path(" in text:
        head.append("from pathlib import Path")
    if isinstance(model, Reproduces):
        head.append(model.source().rstrip())
    else:
        head.append("# model: what was checked")
        head.append("; ".join(f"{name} = model.{name}" for name in used))
    gradients = "gradient(" in text
    if not gradients and "enable_grad" not in text:
        head.append("torch.set_grad_enabled(False)")
    print_it = f"print(float(({expected} - {seen}).abs().max()))"
    seen_now = f"  # rounding makes {within.floor * within.deviation:.0e}"
    return "\n".join([*head, *lines, print_it + seen_now]) + "\n"


def _needed(lines: list[str], text: str) -> list[str]:
    """``lines`` without inputs that nothing uses."""
    rest = "\n".join(lines[2:]) + text
    inputs = [line for line in lines[:2] if re.search(rf"\b{line.partition(' ')[0]}\b", rest)]
    return inputs + lines[2:]
