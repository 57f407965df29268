"""Losses and answers of the smallest versions from several seeds, for the lessons.

    python benchmarks/smallest.py [--only NAME ...] [--seeds 0 1 2 3 4]

Each of docs/annotated/smallest learns a rhyme as `python NAME.py` does, and to recall as
`python remember.py NAME` does, from each seed. Training multiplies differences in rounding, so that
another processor gets other figures from the same seed; the range over seeds says how far they may lie.
Results go to benchmarks/results/smallest.json; what is there already is not measured again.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import timing

FOLDER = Path(__file__).parents[1] / "docs" / "annotated" / "smallest"
sys.path.append(str(FOLDER))
RESULTS = timing.RESULTS / "smallest.json"
LESSONS = ("transformer_xl", "compressive", "feedback", "fast_weights", "gated_delta_net")
TASKS = ("rhyme", "recall")


def printed(run: Callable[[], object]) -> str:
    """Text that a function prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        run()
    return out.getvalue()


def rhyme(name: str) -> dict[str, list[float]]:
    """Nats per letter with memory carried and emptied: of the first round, and afterwards."""
    source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    call = source.rpartition("    learn(")[2].rstrip()
    version = import_module(name)
    small = version.small
    learn = import_module("learn").learn
    text = printed(lambda: eval(f"learn({call}", {"learn": learn, "small": small}))
    found = [re.findall(r"(?:round 1|afterwards): ([0-9.]+)", half) for half in halves(text)]
    return dict(
        zip(("carried", "emptied"), ([float(x) for x in half] for half in found), strict=True)
    )


def halves(text: str) -> Iterator[str]:
    """The parts of a text that begin with ``memory``."""
    yield from re.split(r"^memory ", text, flags=re.M)[1:]


def recalled(name: str) -> dict[str, int]:
    """Percentage of right answers, by how many tokens ago the value was written."""
    text = printed(lambda: import_module("remember").recall(import_module(name)))
    return {
        f"{first} to {last}": int(share)
        for first, last, share in re.findall(r"written (\d+) to (\d+) .*: (\d+)% right", text)
    }


def measured(name: str, task: str, seed: int) -> dict[str, Any]:
    """A program's figures from one seed."""
    torch.manual_seed(seed)
    start = time.process_time()
    found: dict[str, Any] = rhyme(name) if task == "rhyme" else recalled(name)
    seconds = round(time.process_time() - start, 1)
    return {"version": name, "task": task, "seed": seed, "found": found, "cpu_seconds": seconds}


def spread(rows: list[dict[str, Any]], name: str, side: str) -> str:
    """Nats per letter of a version afterwards: the mean of all seeds, with the range."""
    each = [
        row["found"][side][-1] for row in rows if (row["version"], row["task"]) == (name, "rhyme")
    ]
    return f"{mean(each):.2f} ({min(each):.2f} to {max(each):.2f})"


def main() -> None:
    parser = timing.parser(__doc__)
    parser.add_argument("--only", nargs="+", default=LESSONS, choices=LESSONS, metavar="NAME")
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=TASKS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    options = parser.parse_args()
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.is_file() else []
    for task in options.tasks:
        for seed in options.seeds:
            for name in options.only:
                key = (name, task, seed)
                if key in [(row["version"], row["task"], row["seed"]) for row in rows]:
                    continue
                rows.append(measured(*key))
                print(rows[-1], flush=True)
                RESULTS.write_text(
                    json.dumps({"machine": timing.machine(), "rows": rows}, indent=1) + "\n"
                )


if __name__ == "__main__":
    main()
