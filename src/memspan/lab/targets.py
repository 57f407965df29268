"""Models whose laws can be checked: objects of several kinds, and models by name."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import runpy
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import nn

from memspan.calls import checked, nearest, nearest_path
from memspan.errors import MemspanError
from memspan.lab.carries_memory import CarriesMemory
from memspan.lab.exclusive import random_numbers
from memspan.lab.installed import require
from memspan.lab.runs.folder import SHIPPED, place_of, run_folder
from memspan.lab.runs.options import PRESETS, read_config
from memspan.lab.runs.run import Run, load
from memspan.models import Backbone, LanguageModel
from memspan.ops.native.waiting import sharing_cores
from statelaws.caches import Causal
from statelaws.case import ITSELF
from statelaws.check import Report
from statelaws.check import check as check_laws
from statelaws.protocol import MADE, RefusedError, Stateful
from statelaws.recipes import CODED, PADDING, RECIPES, VOCABULARY, build
from statelaws.recurrent import Recurrent

TYPE = "transformers:"
"""The prefix of model types."""


@checked
@random_numbers()
@sharing_cores()
def check(
    model: object,
    laws: str | Iterable[str] | None = None,
    seed: int = 0,
    budget: float = 30.0,
) -> Report:
    """Check the laws of a model that carries state.

    Args:
        model: an object with the functions of :class:`statelaws.Stateful`, a run, a
            :class:`LanguageModel` or a backbone, one of torch's recurrent modules, a causal language
            model as in transformers, or the name of one: what ``memspan check`` takes.
        laws: their names, or one name (None: all of them).
        seed: of the inputs, and of random weights.
        budget: CPU seconds, over all threads, after which no new case is started.

    Raises:
        MemspanError: the model carries no state, cannot be read here, or does not exist; there is no
            such law; the budget is not positive.

    Example::

        report = memspan.check(torch.nn.GRU(8, 16))
        assert not report.broken, report
    """
    stateful = named(model, seed=seed) if isinstance(model, str) else as_stateful(model)
    try:
        laws = [laws] if isinstance(laws, str) else laws
        return check_laws(stateful, laws, seed, budget)
    except ValueError as error:
        raise MemspanError(str(error)) from None


def as_stateful(model: object, made: str | None = None) -> Stateful[Any]:
    """The model in the form in which laws are checked; ``made``: Python that makes it, as ``found``,
    for scripts."""
    if isinstance(model, Run):
        model = model.model
    if isinstance(model, LanguageModel | Backbone):
        return CarriesMemory(model)
    if not isinstance(model, type) and isinstance(model, Stateful):
        # Objects that cannot hold it go without.
        with contextlib.suppress(TypeError):
            if made is not None:
                vars(model)["made"] = f"{made}\nmodel = found\nmodel.module.eval()"
        return model
    kind = type(model).__name__
    text = MADE if made is None else f"{made}\nmodule = found.eval()"
    try:
        if isinstance(model, nn.RNNBase):
            return Recurrent(model, text)
        if (
            isinstance(model, nn.Module)
            and "input_ids" in inspect.signature(model.forward).parameters
        ):
            return Causal(model, made=text)
    except RefusedError as error:
        raise _cannot(kind, error) from error
    raise MemspanError(
        f"{kind} has no state that is known here: wrap it in statelaws.Function, or give an "
        "object with the functions of statelaws.Stateful"
    )


def move(model: Stateful[Any], device: torch.device) -> None:
    """Move a model to ``device``.

    Raises:
        MemspanError: it cannot be moved: its weights have no values, or there is no room.
    """
    try:
        model.module.to(device)
    except RecursionError:
        raise MemspanError(ITSELF) from None
    except (NotImplementedError, RuntimeError) as error:
        message = " ".join(str(error).split())[:300]
        raise MemspanError(f"the model cannot be moved to {device}: {message}") from error


def _cannot(what: str, error: RefusedError) -> MemspanError:
    return MemspanError(f"{what} cannot be read: {str(error)[:300].rstrip('.')}")


def is_run(model: object) -> TypeGuard[Run | str | Path]:
    """Whether ``model`` is a run, or the name of one."""
    if isinstance(model, str | Path):
        return (place_of(model).run / "config.toml").is_file()
    return isinstance(model, Run)


def named(
    target: str, trust_remote_code: bool = False, seed: int = 0, vocab_size: int = VOCABULARY
) -> Stateful[Any]:
    """The model of that name: see ``memspan check --help``. ``vocab_size``: of a model type of
    transformers."""
    folder = run_folder(target)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            if target.startswith(TYPE):
                return _recipe(target.removeprefix(TYPE), seed, vocab_size)
            if ".py:" in target:
                return as_stateful(*_from_file(target, seed))
            if is_run(target):
                return as_stateful(load(folder))
            if (folder / "config.json").is_file():
                return _pretrained(folder, trust_remote_code)
            if target in PRESETS or target.endswith(".toml"):
                return as_stateful(_preset(PRESETS.get(target, Path(target))))
        except RefusedError as error:
            raise _cannot(target.removeprefix(TYPE), error) from error
    if folder.is_dir():
        raise MemspanError(
            f"{target} is neither a run, with a config.toml, nor a model of transformers, with a "
            "config.json: check the path"
        )
    if near := nearest(target, [*SHIPPED, *PRESETS]) or nearest_path(target):
        raise MemspanError(f"there is no {target}: perhaps {near} is meant")
    raise MemspanError(
        f"there is no {target}: give a run ({', '.join(SHIPPED)}, or a folder), a preset, a folder "
        f"in transformers' format, {TYPE}TYPE or FILE.py:NAME"
    )


def _preset(file: Path) -> LanguageModel:
    config = read_config(file)
    # Enough for any tokens of bytes, and for the clusters of an adaptive embedding.
    vocab_size = max(256, *(start + 1 for start in (0, *config.embedding.cutoffs)))
    model = config.model.for_segments(config.train.segment_length)
    return LanguageModel(vocab_size, model, config.embedding).eval()


def _recipe(model_type: str, seed: int, vocab_size: int) -> Stateful[Any]:
    require("transformers")
    if model_type not in RECIPES:
        near = nearest(model_type, RECIPES)
        remedy = (
            f"perhaps {near} is meant"
            if near
            else f"there are recipes for {', '.join(sorted(RECIPES))}"
        )
        raise MemspanError(f"{model_type} cannot be built: {remedy}")
    try:
        return build(model_type, seed, vocab_size)
    except (ValueError, KeyError) as error:
        # Such as a type that is newer than the installed version.
        message = f"{model_type} cannot be built: {str(error)[:300]}"
        raise MemspanError(message) from error


def _pretrained(folder: Path, trust_remote_code: bool) -> Stateful[Any]:
    require("transformers")
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    ours = ""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if json.loads((folder / "config.json").read_bytes()).get("model_type") == "memspan":
            # An exported run, which transformers knows by this import.
            importlib.import_module("memspan.lab.integrations.transformers")
            ours = "import memspan.lab.integrations.transformers\n"
    try:
        model_type = AutoConfig.from_pretrained(folder, **options).model_type
        model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    except Exception as error:
        # transformers does not define its own exceptions.
        hint = "; --trust-remote-code executes it" if "trust_remote_code" in str(error) else ""
        raise MemspanError(f"{folder} cannot be loaded: {str(error)[:300]}{hint}") from error
    script = (
        f"{ours}from transformers import AutoModelForCausalLM\n"
        f"module = AutoModelForCausalLM.from_pretrained({str(folder)!r}"
        f"{', trust_remote_code=True' if trust_remote_code else ''}).eval()"
    )
    return Causal(model, CODED.get(model_type), PADDING.get(model_type), script)


def _from_file(target: str, seed: int) -> tuple[object, str]:
    """What ``FILE.py:NAME`` names or, if that is a function, returns; and Python that does so."""
    path, _, name = target.rpartition(":")
    folder = str(Path(path).parent.absolute())
    made = f"import runpy\nimport sys\nsys.path.append({folder!r})\ntorch.manual_seed({seed})\n"
    made += f"found = runpy.run_path({str(Path(path).absolute())!r})[{name!r}]"
    if not Path(path).is_file():
        raise MemspanError(f"there is no file {path}: check the path")
    # Last: it must not stand in for an installed library.
    sys.path.append(folder)
    try:
        found = runpy.run_path(path).get(name)
        if inspect.isfunction(found) or inspect.isclass(found):
            found = found()
            made += "()"
    except (Exception, SystemExit, GeneratorExit) as error:
        raise MemspanError(f"{target} stopped with {type(error).__name__}: {error}") from error
    if found is None:
        raise MemspanError(f"{path} has no {name} that is a model or makes one: check the name")
    return found, made
