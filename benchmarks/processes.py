"""One process against several that share a batch: do the losses agree, and is it faster?

    python benchmarks/processes.py                    # 1 process; 2 with DDP; 2 with FSDP2
    python benchmarks/processes.py --steps 60 --model feedback

Every training is `memspan train` as a command, each process with one thread. Sides take turns, round by
round. Speed is that of the records in metrics.jsonl, wall clock, the first left out; CPU seconds are
those of all processes of the command, start included. Written: results/processes.json.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from memspan.training import metrics
from timing import machine

RESULTS = Path(__file__).resolve().parent / "results"
SIDES = {"1": ["--nproc", "1"], "2 ddp": ["--nproc", "2"]}
SIDES["2 fsdp"] = ["--nproc", "2", "--train.parallel", "fsdp"]


def run(options: list[str], folder: Path) -> dict[str, Any]:
    """One training: its losses, tokens per second and CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "memspan", "train", *options, "--out", str(folder)]
    subprocess.run(
        command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    records = metrics.read(folder / "metrics.jsonl")
    training = [r for r in records if "train_nats_per_token" in r]
    return {
        "losses": [r["train_nats_per_token"] for r in training],
        "tokens_per_second": median(r["tokens_per_second"] for r in training[1:]),
        "cpu_seconds": sum(
            getattr(after, name) - getattr(before, name) for name in ("ru_utime", "ru_stime")
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="transformer-xl")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    common = ["--model", arguments.model, "--train.steps", str(arguments.steps)]
    common += ["--train.device", "cpu", "--train.evaluate-every", "0", "--train.save-every", "0"]
    common += ["--train.evaluate-tokens", "1024", "--train.sample-tokens", "0"]
    rounds: list[dict[str, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(arguments.rounds):
            rounds.append({})
            for side in list(SIDES)[:: 1 if number % 2 else -1]:
                folder = Path(temporary) / f"{number}-{side.replace(' ', '-')}"
                rounds[-1][side] = run(common + SIDES[side], folder)
    report: dict[str, Any] = {"machine": machine(), "model": arguments.model, "sides": {}}
    for side in SIDES:
        one = [r["1"] for r in rounds]
        these = [r[side] for r in rounds]
        ratios = [
            a["tokens_per_second"] / b["tokens_per_second"] for a, b in zip(these, one, strict=True)
        ]
        pairs = zip(these[0]["losses"], one[0]["losses"], strict=True)
        report["sides"][side] = {
            "tokens_per_second": median(r["tokens_per_second"] for r in these),
            "speed_of_one": [min(ratios), median(ratios), max(ratios)],
            "cpu_seconds": median(r["cpu_seconds"] for r in these),
            "largest_relative_loss_difference": max(abs(a - b) / b for a, b in pairs),
        }
        low, middle, high = report["sides"][side]["speed_of_one"]
        print(
            f"{side:<7} {report['sides'][side]['tokens_per_second']:9,.0f} tokens/s   "
            f"{middle:.2f} of one ({low:.2f} to {high:.2f})   "
            f"CPU {report['sides'][side]['cpu_seconds']:.0f} s   losses differ by at most "
            f"{report['sides'][side]['largest_relative_loss_difference']:.1e}"
        )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "processes.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
