"""Models that can be checked: objects of several kinds, and models by name."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from statelaws.adapters.recipes import CODED, PADDING, RECIPES, VOCABULARY, build
from statelaws.adapters.recurrent import Recurrent
from statelaws.adapters.transformers import Causal
from statelaws.errors import RefusedError, StatelawsError
from statelaws.protocol import MADE, Stateful
from statelaws.reading import ITSELF

TYPE = "transformers:"
"""The prefix of model types."""


def named(target: str, seed: int = 0, trust_remote_code: bool = False) -> Stateful[Any]:
    """The model of that name: see ``statelaws check --help``.

    Raises:
        StatelawsError: there is none, or its laws cannot be checked.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if target.startswith(TYPE):
            return recipe(target.removeprefix(TYPE), seed)
        if (Path(target) / "config.json").is_file():
            return pretrained(Path(target), trust_remote_code)
        if is_object(target):
            return as_stateful(*found(target, seed))
    raise StatelawsError(
        f"there is no {target}: give FILE.py:NAME, MODULE:NAME, {TYPE}TYPE or a folder in "
        "transformers' format"
    )


def as_stateful(model: object, made: str | None = None) -> Stateful[Any]:
    """The model in the form in which laws are checked.

    Args:
        model: a :class:`Stateful`, one of torch's recurrent modules, or a causal language model as in
            transformers.
        made: Python that makes it, as ``found``, for scripts.

    Raises:
        StatelawsError: it has no state that is known here, or cannot be read.
    """
    if not isinstance(model, type) and isinstance(model, Stateful):
        # Objects that cannot hold it go without.
        with contextlib.suppress(TypeError):
            if made is not None:
                vars(model)["made"] = f"{made}\nmodel = found\nmodel.module.eval()"
        return model
    kind = type(model).__name__
    text = MADE if made is None else f"{made}\nmodule = found.eval()"
    with _refused_as(kind):
        if isinstance(model, nn.RNNBase):
            return Recurrent(model, text)
        if (
            isinstance(model, nn.Module)
            and "input_ids" in inspect.signature(model.forward).parameters
        ):
            return Causal(model, made=text)
    raise StatelawsError(
        f"{kind} has no state that is known here: wrap it in statelaws.Function, or give an object "
        "with the functions of statelaws.Stateful"
    )


@contextlib.contextmanager
def _refused_as(what: str) -> Any:
    """Name the model whose refusal is raised."""
    try:
        yield
    except RefusedError as error:
        message = str(error)[:300].rstrip(".")
        raise StatelawsError(f"{what} cannot be read: {message}") from error


def move(model: Stateful[Any], device: torch.device) -> None:
    """Move a model to ``device``.

    Raises:
        StatelawsError: it cannot be moved: its weights have no values, or there is no room.
    """
    try:
        model.module.to(device)
    except RecursionError:
        raise StatelawsError(ITSELF) from None
    except (NotImplementedError, RuntimeError) as error:
        message = " ".join(str(error).split())[:300]
        raise StatelawsError(f"the model cannot be moved to {device}: {message}") from error


def recipe(model_type: str, seed: int = 0, vocab_size: int = VOCABULARY) -> Stateful[Any]:
    """A small model of a type of transformers, with random weights.

    Raises:
        StatelawsError: there is no recipe, or the installed version of transformers cannot make it.
    """
    if model_type not in RECIPES:
        near = difflib.get_close_matches(model_type, RECIPES, n=1, cutoff=0.7)
        known = f"there are recipes for {', '.join(sorted(RECIPES))}"
        remedy = f"perhaps {near[0]} is meant" if near else known
        raise StatelawsError(f"{model_type} cannot be built: {remedy}")
    _need_transformers()
    with _refused_as(model_type):
        return build(model_type, seed, vocab_size)


def pretrained(folder: Path, trust_remote_code: bool = False, before: str = "") -> Stateful[Any]:
    """The causal language model in a folder in transformers' format.

    Args:
        folder: with a ``config.json``.
        trust_remote_code: execute code that comes with it.
        before: lines of Python that scripts begin with.

    Raises:
        StatelawsError: it cannot be loaded or read.
    """
    _need_transformers()
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    try:
        model_type = AutoConfig.from_pretrained(folder, **options).model_type
        model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    except Exception as error:
        # transformers does not define its own exceptions.
        hint = "; --trust-remote-code executes it" if "trust_remote_code" in str(error) else ""
        raise StatelawsError(f"{folder} cannot be loaded: {str(error)[:300]}{hint}") from error
    made = (
        f"{before}from transformers import AutoModelForCausalLM\n"
        f"module = AutoModelForCausalLM.from_pretrained({str(folder)!r}"
        f"{', trust_remote_code=True' if trust_remote_code else ''}).eval()"
    )
    with _refused_as(str(folder)):
        return Causal(model, CODED.get(model_type), PADDING.get(model_type), made)


def _need_transformers() -> None:
    try:
        importlib.import_module("transformers")
    except ImportError as error:
        raise StatelawsError(
            f"transformers cannot be imported ({error}): pip install 'transformers>=5.4,<6'"
        ) from error


def is_object(target: str) -> bool:
    """True for ``FILE.py:NAME`` and ``MODULE:NAME``."""
    place, colon, name = target.rpartition(":")
    module = all(part.isidentifier() for part in place.split("."))
    return bool(colon) and name.isidentifier() and (place.endswith(".py") or module)


def found(target: str, seed: int = 0) -> tuple[object, str]:
    """Find the object of ``FILE.py:NAME`` or ``MODULE:NAME``; a function or a class is called for it.

    Returns:
        The object, and Python that makes it and calls it ``found``.

    Raises:
        StatelawsError: there is no such file, module or name, or its code raises an error.
    """
    place, _, name = target.rpartition(":")
    file = Path(place) if place.endswith(".py") else None
    if file is not None and not file.is_file():
        raise StatelawsError(f"there is no file {place}: check the path")
    folder = str(Path.cwd() if file is None else file.parent.absolute())
    made = f"import sys\nsys.path.append({folder!r})\ntorch.manual_seed({seed})\n"
    # Last: it must not stand in for an installed library.
    sys.path.append(folder)
    try:
        if file is None:
            made += f"from {place} import {name}\nfound = {name}"
            value = getattr(importlib.import_module(place), name, None)
        else:
            made = f"import runpy\n{made}found = runpy.run_path({str(file.absolute())!r})[{name!r}]"
            value = runpy.run_path(place).get(name)
        if inspect.isfunction(value) or inspect.isclass(value):
            value = value()
            made += "()"
    except (Exception, SystemExit, GeneratorExit) as error:
        raise StatelawsError(f"{target} stopped with {type(error).__name__}: {error}") from error
    if value is None:
        raise StatelawsError(f"{place} has no {name} that is a model or makes one: check the name")
    return value, made
