"""Options as flags and as TOML: presets, a run's ``config.toml``, the command line, one set of checks.

A TOML file is flattened into flags that stand before the user's own, so that the same parser checks
both, with the same messages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import tyro

from memspan.data.options import DataConfig
from memspan.errors import MemspanError
from memspan.files.bytes import read_limited
from memspan.models.options import EmbeddingConfig
from memspan.models.registry import MODELS
from memspan.runs.options import RunConfig
from memspan.training.options import OptimConfig, TrainConfig

SECTIONS = {
    "model": object,
    "embedding": EmbeddingConfig,
    "data": DataConfig,
    "optim": OptimConfig,
    "train": TrainConfig,
}
"""Tables of a file and their options; the model's are its architecture's. A file says how to train,
not where to write: no other flag can come from it."""
LIMIT = 1 << 16
"""Bytes of a file at most; those that memspan writes have two thousand."""
DOTS = 32
"""Dots in a line at most. The parser takes memory and time with the square of a key's parts."""
T = TypeVar("T")
PRESETS = {
    file.name.removesuffix(".toml"): Path(str(file))
    for file in sorted(resources.files("memspan").joinpath("presets").iterdir(), key=str)
    if file.name.endswith(".toml")
}
"""The presets that memspan brings along, name -> file."""


def preset_file(name: str) -> Path:
    """The file of a preset: one of ours by name, or any ``.toml`` by its path.

    Raises:
        MemspanError: there is no preset of that name.
    """
    if name.endswith(".toml") or os.sep in name:
        return Path(name)
    if name not in PRESETS:
        raise MemspanError(f"no preset {name!r}: use one of {', '.join(PRESETS)}, or a .toml file")
    return PRESETS[name]


def flags_from_toml(path: Path) -> list[str]:
    """``[train] batch_size = 8`` becomes ``--train.batch-size=8``.

    Raises:
        MemspanError: the file is missing, no TOML, or holds what is no option.
    """
    try:
        text = read_limited(path, LIMIT).decode()
        if max(line.count(".") for line in text.split("\n")) > DOTS:
            raise ValueError(f"a line has more than {DOTS} dots")
        values = tomllib.loads(text)
    except OSError as error:
        raise MemspanError(f"cannot read {path} ({error.strerror}): check the path") from None
    # The last two: an integer of thousands of digits, and tables nested as deep.
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise MemspanError(f"{path} is no valid TOML ({error}): correct it") from None
    flags = []
    if "architecture" in values:
        flags.append(f"--model={values.pop('architecture')}")
    sections = _sections(flags)
    for section, options in values.items():
        if section not in SECTIONS or not isinstance(options, dict):
            raise MemspanError(
                f"{path}: {section[:40]!r} is no table of options: use architecture = ... and "
                f"[{'], ['.join(SECTIONS)}]"
            )
        kinds = {f.name: f.type for f in dataclasses.fields(sections[section])}
        for name, value in options.items():
            if name in kinds and isinstance(value, bool) != (kinds[name] == "bool"):
                wanted = "true or false" if kinds[name] == "bool" else "a number or a name"
                raise MemspanError(
                    f"{path}: {section}.{name} is {json.dumps(value, default=str)[:80]}, and must "
                    f"be {wanted}: correct it"
                )
            flags += _flag(path, f"{section}.{name}", value)
    return flags


def _sections(flags: list[str]) -> dict[str, type]:
    return {**SECTIONS, "model": MODELS[architecture_of(flags)]}


def _flag(path: Path, name: str, value: Any) -> list[str]:
    """A value stays a value, even one such as ``--out=elsewhere``."""
    scalar = isinstance(value, str | int | float)
    # Names that look like flags would be taken for them.
    items = isinstance(value, list) and all(
        type(item) in (int, float) or (isinstance(item, str) and item.isidentifier())
        for item in value
    )
    if not (scalar or items) or not re.fullmatch(r"[a-z]+\.[A-Za-z0-9_-]+", name):
        raise MemspanError(f"{path}: {name} is no option or has no such value: correct it")
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        head, _, last = flag.rpartition(".")
        return [flag if value else f"{head}.no-{last}"]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    return [f"{flag}={value}"]


def architecture_of(arguments: list[str], default: str = RunConfig.architecture) -> str:
    """The last ``--model NAME`` among the flags, or the default."""
    name = default
    for i, flag in enumerate(arguments):
        if flag == "--model" and i + 1 < len(arguments):
            name = arguments[i + 1]
        elif flag.startswith("--model="):
            name = flag.removeprefix("--model=")
    # An unknown name is reported by the parser, which lists the choices.
    return name if name in MODELS else default


def read_config(path: Path) -> RunConfig[Any]:
    """The options in a run's ``config.toml``.

    Raises:
        MemspanError: an unknown key, a wrong type or a value out of range.
    """
    flags = flags_from_toml(path)
    kind: Any = RunConfig[MODELS[architecture_of(flags)]]  # type: ignore[misc]
    try:
        config: RunConfig[Any] = _parsed(kind, flags, "config.toml")
    except MemspanError as error:
        raise MemspanError(f"{path}: {error}; correct the file") from None
    return config


def load_config(folder: Path) -> RunConfig[Any]:
    """The options of the run in ``folder``, from its ``config.toml``.

    Raises:
        MemspanError: it is no run, or the file is damaged.
    """
    if not folder.is_dir():
        raise MemspanError(f"no run at {folder}: check the path, or train one with memspan train")
    if not (folder / "config.toml").is_file():
        raise MemspanError(f"{folder} is no run, it has no config.toml: check the path")
    return read_config(folder / "config.toml")


def parsed(kind: type[T], arguments: list[str], program: str) -> T:
    """The command line as ``kind``; exits after ``--help``.

    Raises:
        MemspanError: an unknown flag, a value of the wrong type or out of its range.
    """
    if {"-h", "--help"} & set(arguments):
        return tyro.cli(kind, args=arguments, prog=program)
    try:
        return _parsed(kind, arguments, program)
    except MemspanError as error:
        raise MemspanError(f"{error}; {program} --help explains every option") from None


def _parsed(kind: type[T], arguments: list[str], program: str) -> T:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            return tyro.cli(kind, args=arguments, prog=program)
    except SystemExit:
        raise MemspanError(_in_one_line(said.getvalue(), arguments)) from None


def _in_one_line(box: str, arguments: list[str]) -> str:
    """What the parser says between lines of dashes: a title, the mistake, and flags spelt alike."""
    title, *others = re.split(r"-{9,}", " ".join(box.split()))
    mistake = others.pop(0) if others else title
    alike = [re.search(r"--\S+", part) for part in others if "Perhaps you meant" in part]
    hints = [found[0] for found in alike if found]
    # The parser looks at spelling only: --steps is nearer to --optim.warmup-steps.
    bare = re.match(r"Unrecognized options: --([a-z0-9-]+)\b(?!\.)", mistake.strip())
    if bare and hints:
        full = [
            f"--{section}.{bare[1]}"
            for section, kind in _sections(arguments).items()
            if bare[1].replace("-", "_") in {f.name for f in dataclasses.fields(kind)}
        ]
        hints = full or hints
    # Where an option's own check fails, its message says all.
    mistake = re.sub(r"^Error parsing config(\.\w+)?: ", "", mistake.strip()).rstrip(".")
    return mistake + "".join(f"; perhaps {hint} is meant" for hint in hints)


def to_toml(config: RunConfig[Any]) -> str:
    """The options as ``config.toml``; options that are None are left out."""
    values = dataclasses.asdict(config)
    lines = [f"architecture = {json.dumps(values.pop('architecture'))}"]
    for section, options in values.items():
        lines += ["", f"[{section}]"]
        for name, value in options.items():
            if value is not None:
                value = list(value) if isinstance(value, tuple) else value
                # Not as JSON's pairs of surrogates, which TOML does not know.
                lines.append(f"{name} = {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"
