"""Losses and answers of the smallest versions from several seeds, for the lessons.

    python benchmarks/smallest.py [--only NAME ...]

Each of docs/annotated/smallest learns a rhyme as `python NAME.py` does, from three seeds, and to recall
as `python remember.py NAME` does, from one. Training multiplies differences in rounding, so that
another processor gets other figures from the same seed; the range over seeds says how far they may lie.
Results go to benchmarks/results/smallest.json; what is there already is not measured again.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import timing

FOLDER = Path(__file__).parents[1] / "docs" / "annotated" / "smallest"
sys.path.append(str(FOLDER))
RESULTS = timing.RESULTS / "smallest.json"
LESSONS = ("transformer_xl", "compressive", "feedback", "fast_weights", "gated_delta_net")


def printed(run: Callable[[], object]) -> str:
    """Text that a function prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        run()
    return out.getvalue()


def rhyme(name: str, seed: int) -> dict[str, list[float]]:
    """Nats per letter with memory carried and emptied: of the first round, and afterwards."""
    # The program asks for a seed of its own.
    with mock.patch.object(torch, "manual_seed", side_effect=[torch.manual_seed(seed)]):
        text = printed(lambda: runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__"))
    found = [re.findall(r"(?:round 1|afterwards): ([0-9.]+)", half) for half in halves(text)]
    return dict(
        zip(("carried", "emptied"), ([float(x) for x in half] for half in found), strict=True)
    )


def halves(text: str) -> Iterator[str]:
    """The parts of a text that begin with ``memory``."""
    yield from re.split(r"^memory ", text, flags=re.M)[1:]


def recalled(name: str, seed: int) -> dict[str, int]:
    """Percentage of right answers, by how many tokens ago the value was written."""
    torch.manual_seed(seed)
    text = printed(lambda: import_module("remember").recall(import_module(name)))
    return {
        f"{first} to {last}": int(share)
        for first, last, share in re.findall(r"written (\d+) to (\d+) .*: (\d+)% right", text)
    }


TASKS: dict[str, tuple[Callable[[str, int], Any], int]] = {
    "rhyme": (rhyme, 3),
    "recall": (recalled, 1),
}
"""Name of a task -> its function, and the number of seeds, which begin at 0."""


def main() -> None:
    parser = timing.parser(__doc__)
    parser.add_argument("--only", nargs="+", default=LESSONS, choices=LESSONS, metavar="NAME")
    names = parser.parse_args().only
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.is_file() else []
    known = {(row["version"], row["task"], row["seed"]) for row in rows}
    for task, (learn, n_seeds) in TASKS.items():
        for seed, name in product(range(n_seeds), names):
            if (name, task, seed) in known:
                continue
            start = time.process_time()
            row = {"version": name, "task": task, "seed": seed, "found": learn(name, seed)}
            rows.append(row | {"cpu_seconds": round(time.process_time() - start, 1)})
            print(rows[-1], flush=True)
            content = {"machine": timing.machine(), "rows": rows}
            RESULTS.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
