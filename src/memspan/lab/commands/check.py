"""``memspan check``: the laws of a model that carries state."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from memspan.checks import at_least, check_types
from memspan.errors import MemspanError
from memspan.files.disk import path_of
from memspan.lab.commands.parsing import TARGET_HELP, Modules, parsed
from memspan.lab.commands.threads import OneThread, announce, set_threads
from memspan.lab.printing import say


@dataclass(frozen=True)
class CheckArguments:
    """Check the laws of a model that carries state: that it reads a text the same however it is cut,
    that rows do not affect one another, and that padding, copies, roll-back and files leave the state
    correct.

    Each law holds, is broken (with the smallest case found), inconclusive, refused by the model, or not
    offered. The exit status is 1 if one is broken, 2 if none could be tested.
    """

    target: Annotated[
        str,
        tyro.conf.Positional,
        tyro.conf.arg(metavar="TARGET", help=TARGET_HELP),
    ]
    laws: str | None = None
    """Laws to check, joined by commas, such as cuts,rows (None: all)."""
    seed: int = 0
    """Seed of the inputs, and of random weights."""
    budget: float = 30.0
    """CPU seconds, over all threads, after which no new case is started."""
    device: str = "cpu"
    """cpu, cuda, ...; auto: CUDA if available."""
    threads: OneThread = None
    json: str | None = None
    """File for the report as JSON, replaced if it exists; -: standard output, instead of the
    table."""
    scripts: Path | None = None
    """Folder for scripts that show each broken law (None: only the JSON has them)."""
    trust_remote_code: bool = False
    """Execute code that comes with a folder in transformers' format."""
    modules: Modules = ()

    def __post_init__(self) -> None:
        check_types(self)
        at_least(1, self, "threads")
        if self.scripts is not None and self.scripts.exists() and not self.scripts.is_dir():
            raise MemspanError(
                f"--scripts {self.scripts} is not a folder: name one, new or existing"
            )
        if self.json not in (None, "-") and Path(self.json).is_dir():
            raise MemspanError(f"--json {self.json} is a folder: name a file")


def check(arguments: list[str]) -> None:
    """Run the verb with ``arguments``."""
    options = parsed(CheckArguments, arguments, "memspan check")
    # Otherwise transformers warns of missing kernels for every model.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import memspan
    from memspan.devices import device_for
    from memspan.lab.installed import require

    require("statelaws")
    from memspan.lab.targets import move, named

    announce(set_threads(options.threads, one=True))
    device = device_for(options.device)
    model = named(options.target, options.trust_remote_code, options.seed)
    move(model, device)
    laws = None if options.laws is None else options.laws.split(",")
    report = memspan.check(model, laws, options.seed, options.budget)
    if options.json == "-":
        print(report.to_json())
    else:
        say(report)
        if options.json is not None:
            _write(path_of(options.json), report.to_json() + "\n")
    if options.scripts is not None:
        options.scripts.mkdir(parents=True, exist_ok=True)
        for finding in report.broken:
            if finding.script is not None:
                _write(options.scripts / f"{finding.law}.py", finding.script)
    if report.broken:
        sys.exit(1)
    if not report.tried:
        sys.exit(2)


def _write(path: Path, text: str) -> None:
    """Write a file, and print its path."""
    done = "replaced" if path.exists() else "written"
    path.write_text(text)
    say(f"{done}: {path}", sys.stderr)
