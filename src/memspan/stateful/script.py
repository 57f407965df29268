"""A script that shows a broken law."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

from memspan.stateful.protocol import Reproduces, Stateful
from memspan.stateful.reading import device_of

_FUNCTIONS = (
    "module", "start", "read", "read_padded", "read_packed", "select", "copy", "reset", "truncate",
    "save", "load",
)  # fmt: skip


def script(model: Stateful[Any], lines: Sequence[str], shown: str, comment: str) -> str:
    """Python that runs ``lines`` as far as ``shown`` needs them, and prints that.

    Without memspan if the model :class:`~memspan.stateful.protocol.Reproduces`, or has lines ``made``
    that make it; otherwise ``model`` has to be there, as it was given, in evaluation mode.
    """
    names = _words(shown)
    last = max(
        (i for i, line in enumerate(lines) if names & _words(line.partition(" = ")[0])), default=0
    )
    lines = lines[: last + 1]
    # Calls may matter even if what they return is not used; inputs that are not read do not.
    read = [_words("\n".join([*lines[:i], *lines[i + 1 :], shown])) for i in range(len(lines))]
    lines = [
        line
        for i, line in enumerate(lines)
        if _words(line.partition(" = ")[0]) & {"x", "other"} <= read[i]
    ]
    used = _words("\n".join([*lines, shown]))
    head = ["import torch"]
    if "Path" in used:
        head.append("from pathlib import Path")
    if isinstance(model, Reproduces):
        head.append(_without(model.source(), set(_FUNCTIONS) - used))
    else:
        head.append(getattr(model, "made", "# model: what was checked, in evaluation mode"))
        head.append("; ".join(f"{name} = model.{name}" for name in _FUNCTIONS if name in used))
    device = device_of(model)
    if device.type != "cpu":
        name = "module" if isinstance(model, Reproduces) else "model.module"
        head.append(f"{name}.to({str(device)!r}); torch.set_default_device({str(device)!r})")
    if "autograd" not in used:
        head.append("torch.set_grad_enabled(False)")
    return "\n".join([*head, *lines, f"print({shown})  # {comment}"]) + "\n"


def _without(source: str, names: set[str]) -> str:
    """``source`` without functions of these names."""
    lines = source.splitlines()
    for part in reversed(ast.parse(source).body):
        if isinstance(part, ast.FunctionDef) and part.name in names:
            del lines[part.lineno - 1 : part.end_lineno]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))
