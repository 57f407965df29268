"""Try the laws of a model that carries state."""

from __future__ import annotations

import importlib.metadata
import platform
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from statelaws.bench.bench import Bench
from statelaws.errors import StatelawsError
from statelaws.laws import NAMES
from statelaws.laws.law import length_of
from statelaws.protocol import Stateful
from statelaws.reading import ITSELF, device_of
from statelaws.report import Report
from statelaws.states import stored

FIRST = ("repeatable", "order-of-calls", "causality", "rows", "values", "cuts")
"""Laws that explain others, the first at fault first."""


def check(
    model: Stateful[Any],
    laws: Iterable[str] | None = None,
    seed: int = 0,
    budget: float = 30.0,
) -> Report:
    """Try ``laws`` of ``model``, by name (None: all of :data:`NAMES`).

    After ``budget`` CPU seconds, over all threads, no new case is started; a law that had more to try
    is *inconclusive*. Weights, buffers, modes and random numbers are restored afterwards.

    Raises:
        StatelawsError: there is no such law; the budget is not positive; the model has no weights.
    """
    asked = NAMES if laws is None else tuple(laws)
    if unknown := [name for name in asked if name not in NAMES]:
        raise StatelawsError(f"there is no law {unknown[0]!r}: use {', '.join(NAMES)}")
    if not budget > 0:
        raise StatelawsError(f"budget must be a positive number of seconds, not {budget!r}")
    if not isinstance(getattr(model, "module", None), torch.nn.Module):
        raise StatelawsError(
            f"{model!r:.60} is not a model with the functions of Stateful: make it one by "
            "Recurrent(layer), Function(...) or Causal(model), or give an object of your class"
        )
    if any(child is model.module for child in model.module.children()):
        raise StatelawsError(ITSELF)
    if any(each.is_meta for each in (*model.module.parameters(), *model.module.buffers())):
        raise StatelawsError("its weights are on the device meta, without values: load them first")
    started = time.process_time()
    notes = []
    module = model.module
    # A single layer is the same in both, but for torch's recurrent ones with dropout.
    if module.training and (list(module.children()) or vars(module).get("dropout")):
        notes.append("It came in training mode, and was checked in evaluation mode.")
    with as_it_was(model), tempfile.TemporaryDirectory() as folder:
        bench = Bench(model, seed, budget, Path(folder))
        findings = bench.findings([name for name in NAMES if name in asked])
    tokens = length_of(bench.claims)
    crossed = {
        name: (length, (tokens - 1) // length if name in bench.claims.lengths else 0)
        for name, length in model.claims.lengths.items()
    }
    seconds = time.process_time() - started
    broken = [finding.law for finding in findings if finding.outcome == "broken"]
    if not bench.repeatable and not [*module.children(), *module.parameters()]:
        notes.append(
            "It has no module with weights, so nothing was put into evaluation mode: is dropout on? "
            "Function takes module=."
        )
    if len(broken) > 1:
        first = next((name for name in FIRST if name in broken), broken[0])
        notes.append(f"Look at {first} first: the others may follow from it.")
    versions = _versions(model)
    return Report(
        findings, crossed, bench.dtype, seed, seconds, versions, tuple(notes), bench.tried
    )


@contextmanager
def as_it_was(model: Stateful[Any]) -> Iterator[None]:
    """``model`` in evaluation mode; changes made inside the block are undone afterwards."""
    module = model.module
    device = device_of(model)
    modes = [(each, each.training) for each in module.modules()]
    tensors = [stored(tensor) for tensor in (*module.parameters(), *module.buffers())]
    values = [tensor.detach().clone() for tensor in tensors]
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        try:
            module.eval()
            yield
        finally:
            for each, training in modes:
                each.training = training
            with torch.no_grad():
                for tensor, value in zip(tensors, values, strict=True):
                    tensor.copy_(value)


def _versions(model: Stateful[Any]) -> dict[str, str]:
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    package = type(model.module).__module__.partition(".")[0]
    try:
        return {package: importlib.metadata.version(package), **versions}
    except importlib.metadata.PackageNotFoundError:
        return versions
