"""The command line: ``statelaws check TARGET``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

import torch

from statelaws import __version__
from statelaws.check import check
from statelaws.errors import StatelawsError
from statelaws.targets import move, named

TARGET = """\
FILE.py:NAME or MODULE:NAME, a model or a function that makes one; transformers:TYPE, made small and
random, such as transformers:mamba; or a folder in transformers' format"""
DESCRIPTION = """\
Check the laws of a model that carries state: that it reads a text the same however it is cut, that
rows do not affect one another, and that padding, copies, roll-back and files leave the state correct.
Each law holds, is broken (with the smallest case found), inconclusive, refused by the model, or not
offered. The exit status is 1 if one is broken, 2 if none could be tested."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; exits with status 2 after one line on a user's mistake."""
    options = _parser().parse_args(arguments)
    try:
        status = _check(options)
        sys.stdout.flush()
    except StatelawsError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        print("\nstatelaws: interrupted", file=sys.stderr)
        status = 130
    except BrokenPipeError:
        # The reader of our output has gone, as with `| head`: not an error.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        status = 0
    except OSError as error:
        if not error.strerror:
            raise
        where = f" ({error.filename})" if error.filename else ""
        _fail(f"{error.strerror}{where}: check the path and its permissions")
    if status:
        sys.exit(status)


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        _fail(f"{message}; {self.prog} --help explains every option")


def _fail(line: str) -> NoReturn:
    print(f"statelaws: {line}", file=sys.stderr)
    sys.exit(2)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="statelaws", description="Laws of PyTorch models that carry state.")
    parser.add_argument("--version", action="version", version=f"statelaws {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    check = verbs.add_parser("check", help="check the laws of a model", description=DESCRIPTION)
    add = check.add_argument
    add("target", metavar="TARGET", help=TARGET)
    add("--laws", metavar="NAMES", help="laws to check, joined by commas, such as cuts,rows (all)")
    add("--seed", type=int, default=0, help="seed of the inputs, and of random weights (0)")
    add(
        "--budget",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="CPU seconds, over all threads, after which no new case is started (30)",
    )
    add("--device", default="cpu", help="cpu, cuda, ... (cpu)")
    add("--threads", type=int, default=1, metavar="N", help="threads of PyTorch (1)")
    add(
        "--json",
        metavar="FILE",
        help="file for the report as JSON, which is replaced; -: standard output, not the table",
    )
    add(
        "--scripts",
        type=Path,
        metavar="DIR",
        help="folder for scripts that show each broken law (also in the JSON)",
    )
    add(
        "--trust-remote-code",
        action="store_true",
        help="execute code that comes with a folder in transformers' format",
    )
    return parser


def _check(options: argparse.Namespace) -> int:
    """Check one model and return the exit status."""
    if options.scripts is not None and options.scripts.exists() and not options.scripts.is_dir():
        raise StatelawsError(
            f"--scripts {options.scripts} is not a folder: name one, new or existing"
        )
    if options.json not in (None, "-") and Path(options.json).is_dir():
        raise StatelawsError(f"--json {options.json} is a folder: name a file")
    if options.threads < 1:
        raise StatelawsError(f"--threads must be at least 1, not {options.threads}")
    # Otherwise transformers reports missing kernels for every model.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    torch.set_num_threads(options.threads)
    try:
        device = torch.device(options.device)
    except RuntimeError:
        raise StatelawsError(f"there is no device {options.device}: use cpu or cuda") from None
    model = named(options.target, options.seed, options.trust_remote_code)
    move(model, device)
    laws = None if options.laws is None else options.laws.split(",")
    report = check(model, laws, options.seed, options.budget)
    print(report.to_json() if options.json == "-" else report)
    if options.json not in (None, "-"):
        write(Path(options.json), report.to_json() + "\n")
    if options.scripts is not None:
        options.scripts.mkdir(parents=True, exist_ok=True)
        for finding in report.broken:
            if finding.script is not None:
                write(options.scripts / f"{finding.law}.py", finding.script)
    return 1 if report.broken else 0 if report.tried else 2


def write(path: Path, text: str) -> None:
    """Write a file, and say so on standard error."""
    done = "replaced" if path.exists() else "written"
    path.write_text(text)
    print(f"{done}: {path}", file=sys.stderr)
