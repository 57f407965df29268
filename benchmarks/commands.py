"""`memspan train` as a command, one thread in each process: several processes, and dry runs.

    python benchmarks/commands.py processes              # 1 process; 2 with DDP; 2 with FSDP2
    python benchmarks/commands.py dry-run --text tiny-shakespeare.txt

processes: do the losses of one process and of two that share a batch agree, and is it faster? Sides
take turns, round by round. Speed is that of the records in metrics.jsonl, wall clock, the first left
out; CPU seconds are those of all processes of the command, start included.

dry-run: what `--dry-run` says beforehand, against the same training of a few updates. Peaks are the
largest resident size of a process, with a save before the last update; other work on the machine does
not matter to them, as it does to speeds.

Written: results/processes.json, results/dry-run.json.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from statistics import median
from typing import Any

import timing
from memspan.lab.training import metrics

SIDES = {
    "1": ["--nproc", "1"],
    "2 ddp": ["--nproc", "2"],
    "2 fsdp": ["--nproc", "2", "--train.parallel", "fsdp"],
}
MODELS = {
    "tiny-shakespeare": ["--preset", "tiny-shakespeare"],
    "enwik8-12l, 2 rows of 128": [
        *("--preset", "papers/enwik8-12l", "--train.batch-size", "2"),
        *("--train.segment-length", "128", "--model.memory-length", "128"),
    ],
}
UNITS = {"MB": 1.0, "GB": 1e3}
CHILD = """import json, resource, subprocess, sys
done = subprocess.run(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([used.ru_maxrss * 1024 / 1e6, used.ru_utime + used.ru_stime]))
sys.exit(done.returncode)
"""


def memspan(options: list[str]) -> tuple[str, float, float]:
    """A training command: what it printed, megabytes of its largest process, CPU seconds of all."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, sys.executable, "-m", "memspan", "train", *options],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    said, _, used = done.stdout.rstrip().rpartition("\n")
    return said, *json.loads(used)


def trained(options: list[str], steps: int, save_every: int = 0) -> dict[str, Any]:
    """A short training: its losses, tokens per second, peak and CPU seconds."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        more = {"steps": steps, "save-every": save_every, "evaluate-every": 0}
        more |= {"evaluate-tokens": 1024, "sample-tokens": 0, "device": "cpu"}
        flags = [f"--train.{name}={value}" for name, value in more.items()]
        _, peak, seconds = memspan([*options, *flags, "--out", str(out)])
        records = [r for r in metrics.read(out / "metrics.jsonl") if "tokens_per_second" in r]
    return {
        "losses": [r["train_nats_per_token"] for r in records if "train_nats_per_token" in r],
        "tokens_per_second": median(r["tokens_per_second"] for r in records[1:]),
        "peak_megabytes": round(peak),
        "cpu_seconds": seconds,
    }


def processes(options: Namespace) -> dict[str, Any]:
    rounds: list[dict[str, dict[str, Any]]] = []
    for number in range(options.rounds):
        rounds.append({})
        for side in list(SIDES)[:: 1 if number % 2 else -1]:
            given = ["--model", options.model, *SIDES[side]]
            rounds[-1][side] = trained(given, options.steps or 100)
    report: dict[str, Any] = {"machine": timing.machine(), "model": options.model, "sides": {}}
    one = [r["1"] for r in rounds]
    for side in SIDES:
        these = [r[side] for r in rounds]
        speeds = [[r["tokens_per_second"] for r in runs] for runs in (these, one)]
        found = timing.ratio(*speeds)
        pairs = zip(these[0]["losses"], one[0]["losses"], strict=True)
        report["sides"][side] = {
            "tokens_per_second": median(speeds[0]),
            "speed_of_one": [found.low, found.middle, found.high],
            "cpu_seconds": median(r["cpu_seconds"] for r in these),
            "largest_relative_loss_difference": max(abs(a - b) / b for a, b in pairs),
        }
        print(side, report["sides"][side])
    return report


def dry_run(options: Namespace) -> dict[str, Any]:
    steps = options.steps or 50
    memory = []
    speed = []
    for model, given in MODELS.items():
        for n in (1, 2):
            flags = [*given, "--data.corpus", str(options.text), "--nproc", str(n)]
            said, _, _ = memspan([*flags, "--train.device=cpu", "--dry-run"])
            label = {"model": model, "processes": n}
            # Several processes write while they train on: that takes most.
            found = trained(flags, steps, save_every=steps - 1)
            number, unit, parts = re.search(
                r"memory +([\d.,]+) (MB|GB).*? \((.*?)\)", said
            ).groups()
            estimated = round(float(number.replace(",", "")) * UNITS[unit])
            peaks = {"estimated_megabytes": estimated, "peak_megabytes": found["peak_megabytes"]}
            memory.append(label | peaks | {"parts": parts})
            number, probe = re.search(r"speed +([\d,]+).*?: (.*)", said).groups()
            estimated = float(number.replace(",", ""))
            measured = trained(flags, steps)["tokens_per_second"]
            speeds = {"estimated_tokens_per_second": estimated, "tokens_per_second": measured}
            speed.append(label | speeds | {"probe": probe})
            print(memory[-1], speed[-1], flush=True)
    machine = {"machine": timing.machine()}
    return {"memory": machine | {"rows": memory}, "speed": machine | {"rows": speed}}


WORKS = {"processes": processes, "dry-run": dry_run}


def main() -> None:
    parser = timing.parser(__doc__, rounds=5)
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("--model", default="transformer-xl", help="of processes")
    parser.add_argument("--text", type=Path, help="of dry-run: Tiny Shakespeare, a file")
    parser.add_argument("--steps", type=int, help="updates (default: 100; of dry-run 50)")
    parser.add_argument("--json", type=Path, help="default: results/WORK.json")
    options = parser.parse_args()
    if options.work == "dry-run" and options.text is None:
        parser.error("say where Tiny Shakespeare is: --text FILE")
    path = options.json or timing.RESULTS / f"{options.work}.json"
    path.write_text(json.dumps(WORKS[options.work](options), indent=1) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
