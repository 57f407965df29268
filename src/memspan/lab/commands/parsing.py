"""Command lines as dataclasses: the string under a field is the flag's help. Parsed by tyro.

Only a run's folder says which architecture it has, so the verbs that read one take the options of all
architectures; those that the run's own does not have are refused when it is read.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import importlib
import inspect
import io
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_origin, get_type_hints

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructTypeInfo,
)

from memspan.calls import nearest
from memspan.checks import (
    MatmulPrecision,
    Products,
    at_least,
    check_types,
    refuse_contradictory_precision,
)
from memspan.errors import MemspanError
from memspan.files.disk import path_of
from memspan.lab.commands.threads import Threads
from memspan.lab.printing import say
from memspan.lab.runs.folder import SHIPPED
from memspan.models.registry import MODELS, load_plugins

if TYPE_CHECKING:
    from memspan.lab.runs.run import Run
    from memspan.precision import Precision

T = TypeVar("T")
WRONG_NUMBER = re.compile(r"Error parsing (--[\w.-]+):.*?\b(int|float)\b.*'([^']*)'", re.IGNORECASE)
"""Matches the parser's error about text that is not a number: the option, the type, the text."""
NUMBERS = {"int": "an integer", "float": "a number"}
Modules = Annotated[
    tuple[str, ...],
    tyro.conf.arg(
        name="import",
        metavar="MODULE",
        help="Import this module first: it registers an architecture of your own. May be repeated.",
    ),
    tyro.conf.UseAppendAction,
]
"""The option ``--import``, for the verbs that build models. :func:`import_modules` acts on it."""
Split = Annotated[
    Literal["auto", "train", "validation", "test", "all"],
    tyro.conf.arg(
        help="Part of the corpus. all: the whole text in order. auto: validation, or all for standard "
        "input."
    ),
]
Field = Annotated[
    str | None,
    tyro.conf.arg(
        help="Field or column that holds each record's text, in JSON Lines, CSV, Parquet and data sets "
        "(None: as in training)."
    ),
]
RUN_HELP = (
    "Run folder, for its best weights; one of its checkpoints, such as RUN/checkpoints/step-750; or, "
    f"if there is no such folder, an included run: {', '.join(SHIPPED)}."
)
TARGET_HELP = (
    f"A run, by its folder or, if it is included, by its name ({', '.join(SHIPPED)}); a checkpoint, "
    "such as RUN/checkpoints/step-750; a preset; a folder in transformers' format; transformers:TYPE, "
    "made small and random, such as transformers:mamba; or FILE.py:NAME or MODULE:NAME, a model or a "
    "function that makes one."
)
PRECISION_HELP = (
    "Precision of matrix products; auto means float32. On a CPU without AVX-512, bfloat16 is slow, "
    "except for single tokens of "
    f"{' and '.join(n for n, kind in MODELS.items() if kind.bfloat16_tokens)}, "
    "which are faster if the model is large."
)


@dataclass(frozen=True)
class DeviceArguments:
    """Device and precision for reading trained models."""

    device: str = "auto"
    """auto, cpu, cuda, ..."""
    precision: Annotated[Products, tyro.conf.arg(help=PRECISION_HELP)] = "auto"
    matmul_precision: MatmulPrecision = "auto"
    """Precision of float32 matrix products (auto: as in training). See memspan train --help."""
    threads: Threads = None

    modules: Modules = ()

    def __post_init__(self) -> None:
        check_types(self)
        refuse_contradictory_precision(self.precision, self.matmul_precision)
        at_least(1, self, "threads")

    def keywords(self, *exclude: str) -> dict[str, Any]:
        """Options as keywords of the verb's function, without ``exclude`` and those that open a run."""
        opening = {each.name for each in dataclasses.fields(ReadingArguments)}
        return {name: v for name, v in vars(self).items() if name not in {*opening, *exclude}}


@dataclass(frozen=True)
class ReadingArguments(DeviceArguments):
    """A run and how it is read."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(help=RUN_HELP)] = field(kw_only=True)

    def open_run(self) -> tuple[Run, Precision]:
        """The run, and the precision to read in. Imports torch."""
        from memspan.devices import device_for
        from memspan.lab.runs.run import load, precision_for

        run = load(self.run, str(device_for(self.device)))
        return run, precision_for(run, self.precision, self.matmul_precision)


class HelpInParagraphs(ConstructorRegistry):
    """Joins the lines of each option's help, which tyro would break where the source does."""

    def __init__(self) -> None:
        super().__init__()
        self._asked: StructTypeInfo | None = None
        self.struct_rule(self._joined)

    def _joined(self, info: StructTypeInfo) -> StructConstructorSpec | None:
        if info is self._asked:
            # Leave it to tyro's own rules.
            return None
        self._asked = info
        spec = self.get_struct_spec(info)
        self._asked = None
        if not isinstance(spec, StructConstructorSpec):
            return None
        fields = (dataclasses.replace(f, helptext=_paragraph(f.helptext)) for f in spec.fields)
        return dataclasses.replace(spec, fields=tuple(fields))


def _path(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Path] | None:
    """Read a path; a shell leaves the ``~`` of ``--out=~/runs`` as it is."""
    if info.type is not Path:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="PATH",
        instance_from_str=lambda arguments: path_of(arguments[0]),
        is_instance=lambda value: isinstance(value, Path),
        str_from_instance=lambda path: [str(path)],
    )


def _paragraph(text: str | Callable[[], str | None] | None) -> Callable[[], str]:
    """The help text, or what makes it when it is asked for, as a function that gives one paragraph."""
    return lambda: " ".join(((text() if callable(text) else text) or "").split())


def parsed(kind: type[T], arguments: list[str], program: str, default: T | None = None) -> T:
    """The command line, without the verb, as a ``kind``; exits after ``--help``.

    Raises:
        MemspanError: an option is unknown or missing, or has a wrong value.
    """
    begin_with: dict[str, Any] = {} if default is None else {"default": default}
    said = io.StringIO()
    registry = HelpInParagraphs()
    registry.primitive_rule(_path)
    if not {"-h", "--help"}.isdisjoint(arguments):
        say(f"{_description(kind)}\n")
    try:
        with contextlib.redirect_stderr(said):
            options, unknown = tyro.cli(
                kind,
                args=arguments,
                prog=program,
                return_unknown_args=True,
                description="",
                registry=registry,
                **begin_with,
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        line = _own_message(stop) or _in_one_line(said.getvalue())
        if "(required)" in line:
            # The parser would print the whole help of each.
            line = f"{' and '.join(_required(kind))} must be given: add what is missing"
    else:
        if not unknown:
            return options
        line = _unknown(unknown, list(_flags(default or kind)))
    raise MemspanError(f"{line}; {program} --help explains every option")


def _description(kind: type) -> str:
    """The verb's docstring, of which tyro would make a line for each paragraph."""
    text = inspect.cleandoc((get_origin(kind) or kind).__doc__ or "")
    return "\n\n".join(_paragraph(paragraph)() for paragraph in text.split("\n\n"))


def _required(kind: type) -> list[str]:
    """The names of the fields without a default."""
    return [
        each.name
        for each in dataclasses.fields(kind)
        if each.default is each.default_factory is dataclasses.MISSING
    ]


def _own_message(error: BaseException) -> str | None:
    """The message of a dataclass's own check, if one ended the parser."""
    cause = error.__context__
    while cause is not None and not isinstance(cause, MemspanError):
        cause = cause.__context__
    return None if cause is None else str(cause)


def _in_one_line(said: str) -> str:
    """The parser's explanation without its title, its frame and the help below it."""
    text = re.sub("[\u2500-\u257f]+|-{3,}", " ", said).strip()
    explanation = text.partition("\n")[2]
    first = re.split("Got errors:|Argument helptext:|For full helptext", explanation)[0]
    line = " ".join(first.split()).rstrip(".")
    if wrong := WRONG_NUMBER.match(line):
        name, kind, value = wrong.groups()
        return f"{name} takes {NUMBERS[kind.lower()]}, not {value!r}"
    return line


def _unknown(tokens: list[str], flags: list[str]) -> str:
    name = next((token for token in tokens if token.startswith("-")), None)
    if name is None:
        token = tokens[0]
        text = [flag for flag in flags if flag.endswith(("--prompt", "corpus"))]
        remedy = f"perhaps {text[0]} {shlex.quote(token)} is meant" if text else "drop it"
        return f"unexpected argument {token!r}: {remedy}, or name its option"
    name = name.partition("=")[0].replace("_", "-")
    # Without its section an option is rarely the nearest in spelling.
    by_last = {flag.lstrip("-").rpartition(".")[2].replace("-", "_"): flag for flag in flags}
    last = nearest(name.lstrip("-").rpartition(".")[2].replace("-", "_"), by_last)
    near = difflib.get_close_matches(name, flags, n=1, cutoff=0.8)
    near = near or ([by_last[last]] if last else [])
    return f"there is no option {name}" + "".join(f"; perhaps {flag} is meant" for flag in near)


def _flags(options: Any, prefix: str = "") -> Iterator[str]:
    """The flags of a dataclass or, where its sections have no defaults, of an instance."""
    kind = options if isinstance(options, type) else type(options)
    hints = get_type_hints(kind, include_extras=True)
    for each in dataclasses.fields(kind):
        renamed = [getattr(m, "name", None) for m in getattr(hints[each.name], "__metadata__", ())]
        name = next((n for n in renamed if n is not None), each.name)
        part = getattr(options, each.name, None)
        if dataclasses.is_dataclass(part):
            yield from _flags(part, f"{prefix}{name}." if name else prefix)
        else:
            yield f"--{prefix}{name}".replace("_", "-")


def peek_flags(arguments: list[str]) -> argparse.Namespace:
    """Find the options on which the other options and their defaults depend: ``model``, ``preset``,
    ``resume``, ``init_from`` and the list ``modules``. Mistakes in them are left to :func:`parsed`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--model", "--preset", "--resume"):
        parser.add_argument(name, nargs="?")
    parser.add_argument("--init-from", "--init_from", nargs="?")
    parser.add_argument("--import", dest="modules", nargs="?", action="append", default=[])
    return parser.parse_known_args(arguments)[0]


def import_modules(arguments: list[str]) -> None:
    """Import the modules of ``--import``, which register architectures of their own."""
    load_plugins()
    for name in filter(None, peek_flags(arguments).modules):
        # Last: a file in the current folder must not stand in for an installed library.
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise MemspanError(
                f"--import {name}: there is no module {error.name}: check the name, or install it"
            ) from None


def with_architectures(verb: type[T], *kinds: str) -> type[T]:
    """Extend the dataclass ``verb`` by options of all architectures: ``memory_options``,
    ``reader_options`` or both."""
    found: dict[str, tuple[Any, str]] = {}
    owners: dict[str, list[str]] = {}
    for architecture, model in MODELS.items():
        for kind in (getattr(model, each) for each in kinds):
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
    sources = map(inspect.getsource, kind.__mro__[:-1])
    below = re.compile(rf'^ +{name}: [^\n]*\n +"""(.*?)"""', re.MULTILINE | re.DOTALL)
    text = next((found[1] for source in sources if (found := below.search(source))), "")
    return " ".join(text.split())
