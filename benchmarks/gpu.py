"""memspan on a GPU: laws, golden tests, kernels, training and reading, each beside its prediction.

    python benchmarks/gpu.py                        # `make gpu`; where there is no GPU, status 1
    python benchmarks/gpu.py --device cpu --toy     # the same path on a CPU, at sizes of a toy
    python benchmarks/gpu.py --predict              # count anew what results/gpu-predictions.json says

Each part runs in a process of its own with a limit of time, and all of them within --minutes: what
fails is a line of the table, and the rest goes on. Attention's Triton programs, torch's attention with
a bias ("step 1"), labml-nn and x-transformers at three sizes; a training step and a token of every
architecture beside a plain GPT; the tests of the CPU, by pytest, with what they make on the device.
Written: results/gpu-NAME.json. The status is 1 if something failed, too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import timing
from memspan.devices import device_for
from memspan.errors import MemspanError
from on_gpu import attention, models
from on_gpu.jobs import Job, measured, one_line, predicted
from on_gpu.tests import TESTS, tested
from timing import machine

ROOT = Path(__file__).resolve().parent.parent
PREDICTIONS = ROOT / "benchmarks" / "results" / "gpu-predictions.json"
KERNELS = ROOT / "kernels"
"""Triton's cache that a bundle brings."""
GRACE = 10
"""Seconds between an interrupt and the end."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """Work of one process."""

    seconds: float
    """At most."""
    jobs: Callable[[bool], list[Job]] | None = None
    """Jobs, toys or not; None: :attr:`run`."""
    run: Callable[[torch.device, str | None], Iterator[Row]] | None = None


def parts() -> dict[str, Part]:
    """By name, those first whose results nobody has."""
    found = {"accuracy": Part(90, run=_accuracy)}
    for name in attention.SIZES:
        found[f"attention-{name}"] = Part(60, partial(attention.jobs_of, name))
    for name in models.ARCHITECTURES:
        found[f"model-{name}"] = Part(60, partial(models.jobs_of, name))
    found["rule"] = Part(30, models.rule_jobs)
    for name, seconds in (("golden", 60), ("laws", 180)):
        found[name] = Part(seconds, run=partial(_tests, name))
    assert TESTS.keys() <= found.keys()
    return found


def _accuracy(device: torch.device, _: str | None) -> Iterator[Row]:
    yield from attention.accuracy(device)
    yield from models.accuracy(device)


def _tests(name: str, device: torch.device, only: str | None) -> Iterator[Row]:
    yield tested(name, device, only)


def rows_of(part: Part, device: torch.device, toy: bool, only: str | None) -> Iterator[Row]:
    """The rows of one part, as they are found."""
    if part.run is not None:
        yield from part.run(device, only)
        return
    assert part.jobs is not None
    for job in part.jobs(toy):
        try:
            found = measured(job, device, rounds=1 if toy else 5, seconds=0 if toy else 0.1)
        except Exception as error:
            found = {"error": one_line(error)}
        yield {"what": job.what} | found
        if device.type == "cuda":
            torch.cuda.empty_cache()


def run_apart(name: str, part: Part, options: Namespace, seconds: float) -> list[Row]:
    """The rows of a part that runs in a process of its own for so many ``seconds`` at most."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "rows")
        rows.touch()
        command = [sys.executable, __file__, "--part", name, "--rows", rows]
        command += ["--device", options.device, *(["--toy"] if options.toy else [])]
        command += ["--only", options.only] if options.only else []
        with Path(folder, "said").open("w+") as said:
            running = subprocess.Popen(
                command,
                env=environment(options.device),
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            late = not _ended(running, seconds)
            said.seek(0)
            words = [line for line in said.read().splitlines() if line.strip()]
        found = [json.loads(line) for line in rows.read_text().splitlines()]
    if late:
        found.append({"what": "the rest", "error": f"not done after {seconds:.0f} s"})
    elif running.returncode != 0:
        said_last = words[-1][:300] if words else ""
        found.append({"what": "the rest", "error": f"status {running.returncode}: {said_last}"})
    return [{"part": name} | row for row in found]


def _ended(running: subprocess.Popen[bytes], seconds: float) -> bool:
    """True if a process ended in time by itself; else it and all that it has started are ended."""
    try:
        running.wait(seconds)
        return True
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGINT)
    try:
        running.wait(GRACE)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
    return False


def environment(device: str) -> dict[str, str]:
    """Variables of a part's process: the interpreter on a CPU, and a cache of kernels on a GPU."""
    found = dict(os.environ)
    if device == "cpu":
        found["TRITON_INTERPRET"] = "1"
    elif KERNELS.exists():
        cache = Path(tempfile.gettempdir(), "memspan-gpu-kernels")
        place(KERNELS, cache)
        found.setdefault("TRITON_CACHE_DIR", str(cache))
    return found


def place(kernels: Path, cache: Path) -> None:
    """Copy a cache of Triton's, or what is left of it, to where Triton may write: it names its files by
    their whole paths."""
    shutil.copytree(kernels, cache, dirs_exist_ok=True)
    for path in cache.glob("*/__grp__*.json"):
        names = json.loads(path.read_text())["child_paths"]
        files = [path.parent / name for name in names]
        here = {file.name: str(file) for file in files if file.exists()}
        path.write_text(json.dumps({"child_paths": here}))


def described(device: torch.device) -> Row:
    """The device, and what drives it."""
    found = machine() | {"device": str(device), "device_name": "", "driver": ""}
    if find_spec("triton") is not None:
        from triton import __version__

        found["triton"] = __version__
    if device.type != "cuda":
        return found | {"device_name": str(found["cpu"]) if device.type == "cpu" else device.type}
    found |= {"device_name": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return found | {"driver": said.splitlines()[0].strip()}
    except (OSError, subprocess.CalledProcessError, IndexError):
        return found


# ----- Predictions and the table


def predict(name: str, toy: bool, path: Path) -> None:
    """Add the predictions of a part to those in a file, by part and job."""
    found: dict[str, Row] = json.loads(path.read_text())["predictions"] if path.exists() else {}
    jobs = parts()[name].jobs
    for job in jobs(toy) if jobs is not None else []:
        row = predicted(job)
        found[f"{name}: {job.what}"] = row
        print(f"{name}: {job.what}: {row}", flush=True)
    path.write_text(json.dumps({"predictions": found, "machine": machine()}, indent=1) + "\n")


def beside_predictions(rows: list[Row]) -> list[Row]:
    """``rows`` with what was written down for them."""
    written = json.loads(PREDICTIONS.read_text())["predictions"] if PREDICTIONS.exists() else {}
    return [row | {f"predicted_{unit}": n for unit, n in _numbers(written, row)} for row in rows]


def _numbers(written: dict[str, Row], row: Row) -> Iterator[tuple[str, float]]:
    found = written.get(f"{row['part']}: {row['what']}", {})
    return ((unit, found[unit]) for unit in ("ms", "mib") if unit in found)


COLUMNS = ("part", "what", "ms", "predicted", "MiB", "predicted", "tokens/s", "remark")


def table(rows: list[Row]) -> str:
    """All rows as a table in Markdown."""
    lines = [COLUMNS, ("---",) * len(COLUMNS)]
    for row in rows:
        numbers = (row.get(n) for n in ("ms", "predicted_ms", "mib", "predicted_mib"))
        rate = row.get("tokens_per_second")
        lines.append(
            (
                row["part"],
                row["what"],
                *("" if n is None else f"{n:.3g}" for n in numbers),
                "" if rate is None else f"{rate:,.0f}",
                remark(row),
            )
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def remark(row: Row) -> str:
    """A row's numbers besides speed, or its failure."""
    said = []
    if "passed" in row:
        said.append(f"{row['passed']} passed, {row['failed']} failed, {row['skipped']} skipped")
    if "difference" in row:
        said.append(f"{row['difference']:.1e}, at most {row['at_most']:.0e}")
    if "error" in row:
        said.append(f"FAILED: {row['error']}")
    return "; ".join(said).replace("|", "/")


def main(arguments: list[str] | None = None) -> int:
    known = parts()
    parser = timing.parser(__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, mps, cpu (default: cuda)")
    parser.add_argument("--parts", nargs="+", metavar="PART", help=f"of {', '.join(known)}")
    parser.add_argument("--only", metavar="EXPRESSION", help="tests that match, as pytest's -k")
    parser.add_argument("--minutes", type=float, default=10, help="all in all (default: 10)")
    parser.add_argument(
        "--toy", action="store_true", help="sizes of a toy: the path, not the speed"
    )
    parser.add_argument("--predict", action="store_true", help="write predictions, measure nothing")
    parser.add_argument("--json", type=Path, metavar="PATH", help="where the results go")
    parser.add_argument("--part", help="run this part in this process")
    parser.add_argument("--rows", type=Path, help="where --part writes its rows")
    options = parser.parse_args(arguments)
    names = options.parts or list(known)
    if not known.keys() >= {*names}:
        parser.error(f"there is no part {' '.join({*names} - known.keys())}: {', '.join(known)}")
    if options.predict:
        for name in names:
            predict(name, options.toy, options.json or PREDICTIONS)
        return 0
    try:
        device = device_for(options.device)
    except MemspanError:
        print(
            f"there is no {options.device} here, so nothing was run: this is for a machine with a GPU"
        )
        return 1
    if options.part:
        with options.rows.open("a") as file:
            for row in rows_of(known[options.part], device, options.toy, options.only):
                print(json.dumps(row), file=file, flush=True)
        return 0
    return run(names, options, device)


def run(names: list[str], options: Namespace, device: torch.device) -> int:
    """Run parts one after the other, write what they found, and print the table."""
    where = described(device)
    name = re.sub("[^a-z0-9]+", "-", str(where["device_name"]).lower()).strip("-")
    path = options.json or ROOT / "benchmarks" / "results" / f"gpu-{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.minutes * 60
    rows: list[Row] = []
    for name in names:
        part = parts()[name]
        left = end - time.monotonic() - GRACE
        if left <= 0:
            rows.append({"part": name, "what": "all", "error": "no time was left"})
        else:
            # A CPU may be busy with other things.
            limit = 10 * part.seconds if options.toy else part.seconds
            found = run_apart(name, part, options, min(limit, left))
            rows += found if options.toy else beside_predictions(found)
        failures = sum("error" in row for row in rows if row["part"] == name)
        print(f"{name}: {f'{failures} failed' if failures else 'done'}", flush=True)
        # After every part: whatever ends this, what was found stays.
        path.write_text(json.dumps({"rows": rows, "machine": where}, indent=1) + "\n")
    print(table(rows))
    print(f"written: {path}")
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
