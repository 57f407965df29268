"""Options that several verbs share: a run, how it is read, and those of the architectures.

Only the run's folder says which architecture it has, so the parser takes the options of all of them and
refuses afterwards those that the run's own does not have.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import tyro

from memspan.checks import MatmulPrecision, Products, check_types, refuse_contradictory_precision
from memspan.commands.parsing import Modules
from memspan.errors import MemspanError
from memspan.models.options import BackboneConfig
from memspan.models.registry import MODELS
from memspan.runs.folder import SHIPPED

if TYPE_CHECKING:
    from memspan.precision import Precision
    from memspan.runs.run import Run

RUN_HELP = (
    "Run folder, for its best weights; one of its checkpoints, such as RUN/checkpoints/step-750; or, "
    f"if there is no such folder, a run that comes with memspan: {', '.join(SHIPPED)}."
)
TARGET_HELP = (
    f"A run, by folder or of those that come with memspan ({', '.join(SHIPPED)}); a run's checkpoint, "
    "such as RUN/checkpoints/step-750; a preset; a folder in transformers' format; transformers:TYPE, "
    "made small and random, such as transformers:mamba; or FILE.py:NAME, a model or a function that "
    "makes one."
)


PRECISION_HELP = (
    "Precision of matrix products: auto is float32. On a CPU without AVX-512 bfloat16 is slow, except "
    f"for single tokens of {' and '.join(n for n, kind in MODELS.items() if kind.bfloat16_tokens)}, "
    "which are faster if the model is large."
)


@dataclass(frozen=True)
class DeviceArguments:
    """Device and precision for reading trained models."""

    device: str = "auto"
    """auto, cpu, cuda, ..."""
    precision: Annotated[Products, tyro.conf.arg(help=PRECISION_HELP)] = "auto"
    matmul_precision: MatmulPrecision = "auto"
    """How products of float32 are computed (auto: as in training). See memspan train --help."""

    modules: Modules = ()

    def __post_init__(self) -> None:
        check_types(self)
        refuse_contradictory_precision(self.precision, self.matmul_precision)


@dataclass(frozen=True)
class ReadingArguments(DeviceArguments):
    """A run and how it is read."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(help=RUN_HELP)] = field(kw_only=True)

    def opened(self) -> tuple[Run, Precision]:
        """The run, and the precision to read in. Imports torch."""
        from memspan.devices import device_for
        from memspan.runs.run import load, precision_for

        run = load(self.run, str(device_for(self.device)))
        return run, precision_for(run, self.precision, self.matmul_precision)


T = TypeVar("T")
Kinds = Callable[[type[BackboneConfig]], list[type]]
"""Which dataclasses of options a verb takes from an architecture."""


def memory_and_reader(model: type[BackboneConfig]) -> list[type]:
    """Sizes of the memory, and how it is read."""
    return [model.memory_options, model.reader_options]


def reader_only(model: type[BackboneConfig]) -> list[type]:
    """How the memory is read."""
    return [model.reader_options]


def with_architectures(verb: type[T], kinds: Kinds) -> type[T]:
    """The dataclass ``verb`` with the options of all architectures as further fields."""
    found: dict[str, tuple[Any, str]] = {}
    owners: dict[str, list[str]] = {}
    for architecture, model in MODELS.items():
        for kind in kinds(model):
            for name, hint in get_type_hints(kind).items():
                found.setdefault(name, (hint, _help(kind, name)))
                owners.setdefault(name, []).append(architecture)
    fields: list[tuple[str, Any, None]] = []
    for name, (hint, text) in found.items():
        help_text = f"{text} For {', '.join(owners[name])}."
        fields.append((name, Annotated[hint, tyro.conf.arg(help=help_text)], None))
    return dataclasses.make_dataclass(
        verb.__name__, fields, bases=(verb,), frozen=True, namespace={"__doc__": verb.__doc__}
    )


def _help(kind: type, name: str) -> str:
    """The string under a field, which Python itself does not keep."""
    for base in kind.__mro__[:-1]:
        (statement,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(statement, ast.ClassDef)
        for line, below in pairwise(statement.body):
            match line, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=found)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ) if found == name:
                    return " ".join(text.split())
    return ""


def given_to(model: BackboneConfig, options: object, verb: type, kinds: Kinds) -> dict[str, object]:
    """The architectures' options that were given, checked by the dataclasses of ``model``.

    Args:
        model: the run's.
        options: of the type that :func:`with_architectures` made of ``verb`` and ``kinds``.
        verb: the verb's own options, which are left out.
        kinds: as given to :func:`with_architectures`.

    Raises:
        MemspanError: a value out of range, or an option that only other architectures have.
    """
    common = {field.name for field in dataclasses.fields(verb)}
    given = {n: v for n, v in vars(options).items() if n not in common and v is not None}
    left = dict(given)
    for kind in kinds(type(model)):
        kind(**{f.name: left.pop(f.name) for f in dataclasses.fields(kind) if f.name in left})
    if left:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(left))
        raise MemspanError(f"the architecture of this run has no option {flags}: drop it")
    return given
