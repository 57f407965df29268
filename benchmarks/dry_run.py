"""What `memspan train --dry-run` says beforehand, against the same training: memory and speed.

    python benchmarks/dry_run.py --text tiny-shakespeare.txt

Every side is a command of its own, with one thread in each process: a dry run, then the training of a
few updates. Peaks are the largest resident size of a process; speed is that of the records in
metrics.jsonl, wall clock, the first left out. Written: results/dry-run.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from memspan.training import metrics
from timing import machine

RESULTS = Path(__file__).resolve().parent / "results"
MODELS = {
    "tiny-shakespeare": ["--preset", "tiny-shakespeare"],
    "enwik8-12l, 2 rows of 128": [
        *("--preset", "papers/enwik8-12l", "--train.batch-size", "2"),
        *("--train.segment-length", "128", "--model.memory-length", "128"),
    ],
}
UNITS = {"MB": 1e6, "GB": 1e9}


def memspan(options: list[str]) -> tuple[str, float]:
    """Run a training command: what it printed, and the megabytes of its largest process."""
    command = [sys.executable, "-m", "memspan", "train", *options]
    child = (
        "import resource, subprocess, sys; done = subprocess.run(sys.argv[1:]);"
        "print('peak', resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss);"
        "sys.exit(done.returncode)"
    )
    done = subprocess.run(
        [sys.executable, "-c", child, *command],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    said, _, peak = done.stdout.rpartition("peak ")
    return said, int(peak) * 1024 / 1e6


def row(options: list[str], n_processes: int, steps: int) -> dict[str, Any]:
    """Both sides of one training."""
    options = [*options, "--nproc", str(n_processes), "--train.device", "cpu"]
    said, _ = memspan([*options, "--dry-run"])
    number, unit = re.search(r"memory +([\d.,]+) (MB|GB)", said).groups()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        more = [
            "--train.steps",
            str(steps),
            "--train.evaluate-every",
            "0",
            "--train.save-every",
            "0",
        ]
        more += ["--train.evaluate-tokens", "1024", "--train.sample-tokens", "0"]
        _, peak = memspan([*options, *more, "--out", str(out)])
        records = metrics.read(out / "metrics.jsonl")
    speeds = [r["tokens_per_second"] for r in records if "tokens_per_second" in r]
    return {
        "processes": n_processes,
        "estimated_megabytes": round(float(number.replace(",", "")) * UNITS[unit] / 1e6),
        "peak_megabytes": round(peak),
        "estimated_tokens_per_second": float(
            re.search(r"speed +([\d,]+)", said)[1].replace(",", "")
        ),
        "tokens_per_second": round(median(speeds[1:]), 1),
        "probe": re.search(r"speed .*?: (.*)", said)[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", required=True, help="Tiny Shakespeare, a file")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    arguments = parser.parse_args()
    rows = []
    for name in arguments.models:
        for n_processes in (1, 2):
            options = [*MODELS[name], "--data.corpus", arguments.text]
            rows.append({"model": name, **row(options, n_processes, arguments.steps)})
            print(rows[-1], flush=True)
    RESULTS.mkdir(exist_ok=True)
    report = {"machine": machine(), "rows": rows}
    (RESULTS / "dry-run.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
