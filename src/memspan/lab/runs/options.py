"""All options of a run, and their TOML: presets, and the ``config.toml`` in its folder.

A file is loaded into the dataclasses that the command line fills, so that both get the same checks.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar, cast

import tyro

from memspan.calls import Options, nearest, nearest_path
from memspan.checks import check_types
from memspan.errors import MemspanError
from memspan.files.disk import path_of, read_limited
from memspan.lab.data.options import DataConfig
from memspan.lab.invocation import command
from memspan.lab.runs.folder import SHIPPED, place_of
from memspan.lab.training.options import OptimConfig, TrainConfig
from memspan.models.options import BackboneConfig, EmbeddingConfig
from memspan.models.registry import MODELS

ModelConfig = TypeVar("ModelConfig", bound=BackboneConfig, covariant=True)
DEFAULT_ARCHITECTURE = next(iter(MODELS))


def _names() -> Any:
    """The type of architecture names, which may be registered after this module was imported."""
    return Literal[tuple(MODELS)]


@dataclass(frozen=True)
class RunConfig(Options, Generic[ModelConfig]):
    """All options of a training run, as its `config.toml` holds them."""

    model: ModelConfig
    architecture: Annotated[
        str,
        tyro.conf.arg(
            name="model",
            constructor_factory=_names,
            help_behavior_hint=f"(default: {DEFAULT_ARCHITECTURE})",
        ),
    ] = DEFAULT_ARCHITECTURE
    """Architecture; --model.* below are its options."""
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        check_types(self)
        if self.architecture not in MODELS:
            *names, last = MODELS
            raise MemspanError(
                f"architecture must be {', '.join(names)} or {last}, not {self.architecture!r}"
            )
        kind = MODELS[self.architecture]
        if not isinstance(self.model, kind):
            meant = [name for name, each in MODELS.items() if type(self.model) is each]
            remedy = f"set architecture={meant[0]!r}" if meant else "change one of them"
            raise MemspanError(
                f"architecture {self.architecture} goes with {kind.__name__}, not "
                f"{type(self.model).__name__}: {remedy}"
            )
        if self.optim.compression_learning_rate != 1 and not kind.has_auxiliary_parameters:
            raise MemspanError(
                "compression_learning_rate belongs to architectures with parameters that an auxiliary "
                f"loss trains, and {self.architecture} has none: drop it"
            )


T = TypeVar("T")
SECTIONS: dict[str, type] = {
    "embedding": EmbeddingConfig,
    "data": DataConfig,
    "optim": OptimConfig,
    "train": TrainConfig,
}
"""Tables of a file and their options, besides ``model``, whose options are the architecture's. A file
says how to train, not where to write, so it has no other flags."""
LIMIT = 1 << 14
"""Maximum size of a file in bytes; memspan writes about two thousand."""
_FOLDER = Path(str(resources.files("memspan.lab").joinpath("presets")))
PRESETS = {
    file.relative_to(_FOLDER).with_suffix("").as_posix(): file
    for file in sorted(_FOLDER.rglob("*.toml"), key=lambda file: (len(file.parts), file))
}
"""The presets that come with memspan: name -> file. The papers' are in a separate folder."""


def preset_file(name: str) -> Path:
    """The file of a preset: one that comes with memspan, by name, or any ``.toml``, by path."""
    file = path_of(name)
    if name not in PRESETS and (name.endswith(".toml") or file.exists()):
        return file
    if name not in PRESETS:
        near = nearest(name, PRESETS)
        remedy = f"perhaps {near} is meant" if near else f"use one of {', '.join(PRESETS)}"
        raise MemspanError(f"no preset {name!r}: {remedy}, or give a .toml file")
    return PRESETS[name]


def read_config(path: Path, architecture: str | None = None) -> RunConfig[BackboneConfig]:
    """The options in a preset or in a run's ``config.toml``; those it leaves out have their defaults.

    ``architecture``: the only one allowed, if the file names one (None: any).
    """
    tables = _tables(path)
    name = tables.pop("architecture", None)
    if name is not None and (not isinstance(name, str) or name not in MODELS):
        raise MemspanError(
            f"{path}: there is no architecture {_shown(name)}: use one of {', '.join(MODELS)}, or "
            "import the module that registers it, on the command line with --import MODULE"
        )
    if name and architecture and name != architecture:
        raise MemspanError(f"{path} is for {name}: drop --model {architecture}, or the preset")
    chosen = name or architecture or DEFAULT_ARCHITECTURE
    kinds: dict[str, type] = {"model": MODELS[chosen], **SECTIONS}
    for table, options in tables.items():
        if table not in kinds or not isinstance(options, dict):
            raise MemspanError(
                f"{path}: {_shown(table)} is not a table of options: use architecture = ... and "
                f"[{'], ['.join(kinds)}]"
            )
    try:
        parts: dict[str, Any] = {
            table: section(kinds[table], table, tables.get(table, {})) for table in kinds
        }
        return RunConfig(architecture=chosen, **parts)
    except MemspanError as error:
        raise MemspanError(f"{path}: {error}; correct the file") from None


def _tables(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_limited(path, LIMIT).decode())
    except OSError as error:
        raise MemspanError(f"cannot read {path} ({error.strerror}): check the path") from None
    # ValueError: tomllib's own, and what is not UTF-8; RecursionError: nested too deep.
    except (ValueError, RecursionError) as error:
        raise MemspanError(f"{path} is not valid TOML ({error}): correct it") from None


def section(kind: type[T], table: str, options: object) -> T:
    """The options in one table as its dataclass; those that it leaves out have their defaults."""
    if not isinstance(options, dict):
        raise MemspanError(f"{table} must be a table of options, not {_shown(options)}")
    known = [field.name for field in dataclasses.fields(cast(Any, kind))]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"perhaps {table}.{near[0]} is meant" if near else f"use {', '.join(known)}"
            raise MemspanError(f"there is no option {_shown(f'{table}.{name}')}: {hint}")
    values = {n: tuple(v) if isinstance(v, list) else v for n, v in options.items()}
    try:
        return kind(**values)
    except MemspanError as error:
        raise MemspanError(f"[{table}] {error}") from None


def _shown(name: object) -> str:
    """A name from a file, shortened: it may be long."""
    return repr(name)[:60]


def load_config(folder: Path) -> RunConfig[BackboneConfig]:
    """The options of a run, from its ``config.toml``.

    Args:
        folder: the run's or one of its checkpoints', or the name of a shipped run.
    """
    folder = place_of(folder).run
    if not folder.is_dir():
        near = nearest(str(folder), SHIPPED) or nearest_path(folder)
        guess = f"perhaps {near} is meant" if near else "check the path"
        raise MemspanError(
            f"no run at {folder}: {guess}, train one with {command('train')}, or take one that comes "
            f"with memspan: {', '.join(SHIPPED)}"
        )
    if not (folder / "config.toml").is_file():
        hidden = f", or rename it: it hides the {folder} that comes with memspan"
        raise MemspanError(
            f"{folder} is not a run, it has no config.toml: check the path"
            + (hidden if str(folder) in SHIPPED else "")
        )
    return read_config(folder / "config.toml")


def to_toml(config: RunConfig[BackboneConfig]) -> str:
    """The options as ``config.toml``; those that are None are left out."""
    values = dataclasses.asdict(config)
    lines = [f"architecture = {json.dumps(values.pop('architecture'))}"]
    for section, options in values.items():
        lines += ["", f"[{section}]"]
        for name, value in options.items():
            if value is not None:
                value = list(value) if isinstance(value, tuple) else value
                # Not escaped: TOML does not know JSON's pairs of surrogates.
                lines.append(f"{name} = {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"
