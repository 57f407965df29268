"""``memspan train``: start a run, or resume one."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

import tyro

from memspan.checks import at_least
from memspan.errors import MemspanError
from memspan.lab.commands.parsing import Modules, parsed, peek_flags
from memspan.lab.commands.standard_streams import STDIN, keep_input, settle_output
from memspan.lab.commands.threads import Threads, set_threads
from memspan.lab.data.options import SPLITS, DataConfig, title
from memspan.lab.distributed import reports
from memspan.lab.printing import say
from memspan.lab.runs.folder import place_of
from memspan.lab.runs.options import (
    DEFAULT_ARCHITECTURE,
    PRESETS,
    RunConfig,
    load_config,
    preset_file,
    read_config,
)
from memspan.lab.training.options import BUDGETS
from memspan.models.options import BackboneConfig
from memspan.models.registry import MODELS

if TYPE_CHECKING:
    from rich.console import Console

    from memspan.lab.distributed.processes import Processes

M = TypeVar("M", bound=BackboneConfig)
SIZES = ("n_layers", "d_model", "n_heads", "d_head", "d_ff", "activation")
"""Options that another architecture takes from the run whose weights it starts with."""
PRESET_HELP = (
    f"Preset to start from: {', '.join(PRESETS)}, or your own TOML file. Flags override it."
)


@dataclass(frozen=True)
class TrainArguments(Generic[M]):
    """Train a model on a text. Every run gets a folder with its options, weights and metrics."""

    config: Annotated[RunConfig[M], tyro.conf.arg(name="")]
    preset: Annotated[str | None, tyro.conf.arg(help=PRESET_HELP)] = None
    out: Path | None = None
    """Run folder to write (None: a new one in runs/)."""
    init_from: Path | None = None
    """Initialise from this run or checkpoint, of the same architecture or of another with the same
    width: every weight that fits is copied and listed. Without --preset, its model options and its
    tokeniser are copied, too."""
    resume: Path | None = None
    """Run folder to continue, bit for bit. Training and optimiser options given with it, such as
    --train.steps, replace the run's from here on."""
    nproc: int = 1
    """Processes on this machine, which share the rows of the batch equally. With --resume, their
    number may change. On several machines, use torchrun -m memspan train."""
    threads: Threads = None
    dry_run: bool = False
    """Do not train or write a folder; print parameters, memory per process, speed, disk and hours for
    --nproc processes, from a few updates of up to four rows of made-up text. Exits with status 2 if
    the run does not fit in memory."""

    modules: Modules = ()

    def __post_init__(self) -> None:
        at_least(1, self, "nproc", "threads")
        if self.dry_run and self.config.data.corpus == STDIN:
            raise MemspanError("--dry-run does not read a text: drop --data.corpus -, or --dry-run")
        if self.out is not None and not self.out.name:
            raise MemspanError(
                "--out names the current or the root folder: give a folder for this run alone"
            )
        if self.out is not None and os.path.lexists(self.out) and not self.out.is_dir():
            raise MemspanError(f"--out {self.out} is not a folder: name a new one")
        for name in ("preset", "out", "init_from", "dry_run"):
            if self.resume is not None and getattr(self, name):
                raise MemspanError(
                    f"--resume continues a run in its own folder: drop --{name.replace('_', '-')}, "
                    "or start a new run without --resume"
                )


def train(arguments: list[str]) -> None:
    """Run the verb with ``arguments``."""
    options, begun, arguments = _read(arguments)
    if options.nproc > 1 and not _is_launched() and not options.dry_run:
        _launch(arguments, options.nproc)
        return
    with _joined(options) as (console, processes):
        from memspan.lab.training import start

        signals: list[int] = []
        shared: dict[str, Any] = {
            "console": console,
            "processes": processes,
            "on_stop": signals.append,
        }
        if options.dry_run:
            _dry_run(options, console, processes.size)
        elif options.resume is not None:
            changed = options.config if options.config != begun else None
            start.resume(options.resume, config=changed, **shared)
        else:
            made = options.out is None and processes.first
            own = claimed_folder(options.config) if made else options.out or Path()
            folder = processes.of_first(own)
            with _removed_if_unused(folder if made else None):
                start.train(options.config, folder, init_from=options.init_from, **shared)
        if signals and processes.first and _is_launched():
            reports.note_stop(signals[0])
    settle_output()
    if signals and not _is_launched():
        # As if the signal had ended the process: a job that was stopped is not done.
        sys.exit(128 + signals[0])


def _read(arguments: list[str]) -> tuple[TrainArguments[Any], RunConfig[Any], list[str]]:
    """Parse ``arguments``: the options, those before any flags, and arguments with implied flags."""
    begun = begin_with(arguments)
    arguments = [*arguments, *replacing(arguments)]
    kind: Any = TrainArguments[type(begun.model)]  # type: ignore[misc]
    options = parsed(kind, arguments, "memspan train", kind(begun))
    if options.config.data.corpus == STDIN and not _is_launched():
        kept = keep_text(options.config, options.out, options.resume)
        # If a flag is given twice the second counts, also in launched processes.
        arguments = [*arguments, "--data.corpus", str(kept), "--out", str(kept.with_suffix(""))]
        options = parsed(kind, arguments, "memspan train", kind(begun))
    return options, begun, arguments


def _is_launched() -> bool:
    """True in a process that ``--nproc`` has started."""
    return reports.is_worker() and reports.BY_US in os.environ


@contextlib.contextmanager
def _joined(options: TrainArguments[Any]) -> Iterator[tuple[Console, Processes]]:
    """The console for training, and the processes that share it."""
    if reports.is_worker():
        # Silences DDP's advice against searching for unused parameters, which some options need.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from memspan.lab.training.terminal import Terminal, unbreakable_output

    with unbreakable_output():
        if os.environ.get("RANK", "0") == "0":
            # PyTorch takes seconds to import, and tokenising a new text longer.
            what = options.resume or title(options.config.data.texts)
            say("measuring" if options.dry_run else f"preparing {what}")
        threads = set_threads(options.threads, _recorded_threads(options.resume))
        from memspan.lab.distributed.processes import joined
        from memspan.lab.training import start  # noqa: F401

        with joined() as processes:
            if _is_launched():
                # Until here Ctrl-C ended the process at once, see __main__.py: one that waits for
                # another does so in C++, where Python's exceptions would wait as well.
                signal.signal(signal.SIGINT, signal.default_int_handler)
            console = Terminal(quiet=not processes.first)
            if threads is not None:
                console.print(threads, highlight=False)
            yield console, processes


def _recorded_threads(folder: Path | None) -> int | None:
    """The number of threads with which the run in ``folder`` was last trained; None if unknown."""
    if folder is None:
        return None
    from memspan.lab.runs import checkpoints

    # Faults of the folder are reported when it is resumed.
    with contextlib.suppress(MemspanError):
        environment = checkpoints.latest(folder).state.get("environment")
        recorded = environment.get("threads") if isinstance(environment, dict) else None
        return recorded if isinstance(recorded, int) and recorded > 0 else None
    return None


def _dry_run(options: TrainArguments[Any], console: Console, n_processes: int) -> None:
    from memspan.lab.runs.run import trained
    from memspan.lab.training.estimate import estimate

    if options.init_from is not None:
        trained(options.init_from)
    found = estimate(options.config, n_processes=max(options.nproc, n_processes))
    console.print(str(found), highlight=False)
    found.plan.refuse(found.needs)


def _launch(arguments: list[str], n_processes: int) -> None:
    if reports.is_worker():
        raise MemspanError(
            "--nproc starts processes, but torchrun has already started some: drop one of the two"
        )
    if sys.platform == "win32":
        raise MemspanError(
            "--nproc needs Linux or macOS: train in one process, or in the Windows Subsystem for Linux"
        )
    from memspan.lab.distributed.launch import RunEndedError, launch

    try:
        stopped = launch(["train", *arguments], n_processes)
    except RunEndedError as error:
        say(error.line, sys.stderr)
        sys.exit(error.status)
    if stopped is not None:
        sys.exit(128 + stopped)


def begin_with(arguments: list[str]) -> RunConfig[BackboneConfig]:
    """The options before any flags: those of the run to resume, of the preset, or the defaults."""
    given = peek_flags(arguments)
    if given.model is not None and given.model not in MODELS:
        raise MemspanError(f"there is no --model {given.model}: use one of {', '.join(MODELS)}")
    if given.resume is not None:
        config = load_config(Path(given.resume))
        if given.model not in (None, config.architecture):
            raise MemspanError(
                f"{given.resume} is of architecture {config.architecture}: drop --model "
                f"{given.model}, or start a new run"
            )
        return config
    if given.preset is not None:
        return read_config(preset_file(given.preset), given.model)
    if given.init_from is not None:
        return _as_in(Path(given.init_from), given.model)
    architecture = given.model or DEFAULT_ARCHITECTURE
    return RunConfig(MODELS[architecture](), architecture)


def _as_in(source: Path, architecture: str | None) -> RunConfig[BackboneConfig]:
    """The model, sizes and tokeniser of a run, so that all of its weights fit, and default options.

    ``architecture``: if it is not the run's, the sizes that both have are taken.
    """
    theirs = load_config(source)
    name = architecture or theirs.architecture
    if name == theirs.architecture:
        model = theirs.model
    else:
        kind: Any = MODELS[name]
        shared = {field.name for field in dataclasses.fields(kind)}.intersection(SIZES)
        model = kind(**{n: getattr(theirs.model, n) for n in shared if hasattr(theirs.model, n)})
    tokenizer = "bytes"
    if theirs.data.tokenizer != "bytes":
        tokenizer = str(place_of(source).run.absolute() / "tokenizer.json")
    data = dataclasses.replace(DataConfig(), tokenizer=tokenizer)
    return RunConfig(model, name, data=data, embedding=theirs.embedding)


def replacing(arguments: list[str]) -> list[str]:
    """Flags that turn off options of a preset or the run to resume that ``arguments`` replace: another
    budget, the corpus or the texts of each split, a threshold without early stopping."""
    given = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    budgets = [f"--train.{name.replace('_', '-')}" for name in BUDGETS]
    own = [f"--data.{split}" for split in SPLITS]
    off = []
    if given.intersection(budgets):
        off += [flag for flag in budgets if flag not in given]
    if "--data.train" in given and "--data.corpus" not in given:
        off.append("--data.corpus")
    if "--data.corpus" in given and not given.intersection(own):
        off += own
    flags = [word for flag in off for word in (flag, "None")]
    threshold = "--train.early-stopping-threshold"
    no_patience = r"--train\.early.stopping.patience[= ]None\b"
    if threshold not in given and re.search(no_patience, " ".join(arguments)):
        flags += [threshold, "0"]
    return flags


def new_folder(config: RunConfig[BackboneConfig]) -> Path:
    """An unused folder in ``runs/``, named after the architecture and the text."""
    # The last part of the path that has letters in it: for a glob, often the folder.
    text = config.data.train or config.data.corpus or ""
    parts = [Path(part).stem for part in reversed(Path(text).parts)]
    names = [re.sub(r"[^\w-]+", "-", part).strip("-")[:60] for part in parts]
    corpus = next(filter(None, names), "text")
    number = 1
    while (folder := Path("runs") / f"{config.architecture}-{corpus}-{number}").exists():
        number += 1
    return folder


def claimed_folder(config: RunConfig[BackboneConfig]) -> Path:
    """Make a new folder in ``runs/``; trainings started at the same time each get their own."""
    Path("runs").mkdir(exist_ok=True)
    while True:
        folder = new_folder(config)
        # Another process may have been faster.
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder


@contextlib.contextmanager
def _removed_if_unused(folder: Path | None) -> Iterator[None]:
    """If the run fails before anything is written, remove the folder that was made for it, and an empty
    ``runs/``."""
    try:
        yield
    except BaseException:
        if folder is not None:
            # Folders that are not empty stay.
            with contextlib.suppress(OSError):
                folder.rmdir()
                folder.parent.rmdir()
        raise


def keep_text(config: RunConfig[BackboneConfig], out: Path | None, resume: Path | None) -> Path:
    """Write the text of standard input next to the run's folder, so that the run can be resumed."""
    if resume is not None or reports.is_worker():
        raise MemspanError(
            "a text from standard input is for a new run without torchrun: give --data.corpus a file"
        )
    folder = out or claimed_folder(config)
    with _removed_if_unused(folder if out is None else None):
        kept = folder.with_name(folder.name + ".txt")
        if kept.exists():
            raise MemspanError(
                f"standard input would be kept in {kept}, which exists: remove it, give another --out, "
                f"or train on it with --data.corpus {kept}"
            )
        keep_input(kept, "--data.corpus")
    say(f"standard input is kept in {kept}")
    return kept
