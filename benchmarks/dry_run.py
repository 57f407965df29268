"""What `memspan train --dry-run` says beforehand, against the same training: memory and speed.

    python benchmarks/dry_run.py --text tiny-shakespeare.txt
    python benchmarks/dry_run.py --text tiny-shakespeare.txt --measure memory

Every side is a command of its own, with one thread in each process: a dry run, then the training of a
few updates. Peaks are the largest resident size of a process, with a save before the last update;
other work on the machine does not matter to them. Speed is that of the records in metrics.jsonl, wall
clock, the first left out. Written: results/dry-run.json, of which what is not measured stays.
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


def both(options: list[str], steps: int, save_every: int) -> tuple[str, list[float], float]:
    """What a dry run says; the speeds that training then has, and its largest process's megabytes."""
    said, _ = memspan([*options, "--dry-run"])
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        more = {
            "--train.steps": steps,
            "--train.evaluate-every": 0,
            "--train.save-every": save_every,
            "--train.evaluate-tokens": 1024,
            "--train.sample-tokens": 0,
            "--out": out,
        }
        _, peak = memspan([*options, *(str(part) for pair in more.items() for part in pair)])
        records = metrics.read(out / "metrics.jsonl")
    return said, [r["tokens_per_second"] for r in records if "tokens_per_second" in r], peak


def memory(options: list[str], steps: int) -> dict[str, Any]:
    """Both sides of what one training takes."""
    # Several processes write while they train on: that takes most.
    said, _, peak = both(options, steps, save_every=steps - 1)
    number, unit = re.search(r"memory +([\d.,]+) (MB|GB)", said).groups()
    estimated = float(number.replace(",", "")) * UNITS[unit] / 1e6
    parts = re.search(r"memory .*? \((.*?)\)", said)[1]
    return {
        "estimated_megabytes": round(estimated),
        "peak_megabytes": round(peak),
        "parts": parts,
    }


def speed(options: list[str], steps: int) -> dict[str, Any]:
    """Both sides of how fast one training is."""
    said, speeds, _ = both(options, steps, save_every=0)
    estimated = re.search(r"speed +([\d,]+)", said)[1]
    return {
        "estimated_tokens_per_second": float(estimated.replace(",", "")),
        "tokens_per_second": round(median(speeds[1:]), 1),
        "probe": re.search(r"speed .*?: (.*)", said)[1],
    }


MEASURES = {"memory": memory, "speed": speed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", required=True, help="Tiny Shakespeare, a file")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--measure", nargs="+", choices=MEASURES, default=list(MEASURES))
    arguments = parser.parse_args()
    path = RESULTS / "dry-run.json"
    report = json.loads(path.read_text()) if path.exists() else {}
    for name in arguments.measure:
        rows = []
        for model, given in MODELS.items():
            for n in (1, 2):
                options = [*given, "--data.corpus", arguments.text, "--train.device", "cpu"]
                measured = MEASURES[name]([*options, "--nproc", str(n)], arguments.steps)
                rows.append({"model": model, "processes": n, **measured})
                print(rows[-1], flush=True)
        report[name] = {"machine": machine(), "rows": rows}
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
