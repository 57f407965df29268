"""Options as flags and as TOML: presets, a run's ``config.toml``, the command line, one set of checks.

A TOML file is flattened into flags that stand before the user's own, so that the same parser checks
both, with the same messages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import tyro

from memspan.config import MODELS, RunConfig
from memspan.errors import MemspanError


def flags_from_toml(path: Path) -> list[str]:
    """``[train] batch_size = 8`` becomes ``--train.batch-size 8``.

    Raises:
        MemspanError: the file is missing or no TOML.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MemspanError(f"cannot read {path} ({error.strerror}): check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise MemspanError(f"{path} is no valid TOML ({error}): correct it") from None
    if "architecture" in values:
        values = {"model": values.pop("architecture")} | {
            f"model.{k}" if k == "model" else k: v for k, v in values.items()
        }
    flags: list[str] = []
    for name, value in values.items():
        if name == "model.model":
            flags += _flatten("model", value)
        else:
            flags += _flatten(name, value)
    return flags


def _flatten(name: str, value: Any) -> list[str]:
    if isinstance(value, dict):
        return [flag for key, item in value.items() for flag in _flatten(f"{name}.{key}", item)]
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        head, _, last = flag.rpartition(".")
        negative = f"{head}.no-{last}" if head else f"--no-{flag[2:]}"
        return [flag if value else negative]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    return [flag, str(value)]


def architecture_of(arguments: list[str]) -> str:
    """The last ``--model NAME`` among the flags, or the default."""
    name = RunConfig.architecture
    for i, flag in enumerate(arguments):
        if flag == "--model" and i + 1 < len(arguments):
            name = arguments[i + 1]  # type: ignore[assignment]
        elif flag.startswith("--model="):
            name = flag.removeprefix("--model=")  # type: ignore[assignment]
    # An unknown name is reported by the parser, which lists the choices.
    return name if name in MODELS else "transformer-xl"


def read_config(path: Path) -> RunConfig[Any]:
    """The options in a run's ``config.toml``.

    Raises:
        MemspanError: an unknown key, a wrong type or a value out of range.
    """
    flags = flags_from_toml(path)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            kind: Any = RunConfig[MODELS[architecture_of(flags)]]  # type: ignore[misc]
            config: RunConfig[Any] = tyro.cli(kind, args=flags, prog="config.toml")
    except SystemExit:
        words = re.sub(r"[─│╭╮╰╯]", " ", said.getvalue()).split("For full helptext")[0]
        raise MemspanError(f"{path}: {' '.join(words.split())}; correct the file") from None
    return config


def to_toml(config: RunConfig[Any]) -> str:
    """The options as ``config.toml``; options that are None are left out."""
    values = dataclasses.asdict(config)
    lines = [f"architecture = {json.dumps(values.pop('architecture'))}"]
    for section, options in values.items():
        lines += ["", f"[{section}]"]
        for name, value in options.items():
            if value is not None:
                value = list(value) if isinstance(value, tuple) else value
                lines.append(f"{name} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"
