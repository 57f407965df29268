"""What activation checkpointing saves and costs in each architecture.

    python benchmarks/recompute.py                  -> results/recompute.json

A segment forward and backward with memory and dropout 0.1: eight layers of width 128, 4 heads,
feed-forward 512, 8 rows of 256 bytes, 256 slots of memory. Bytes of tensors that live at once at most,
and the process's peak beyond model and memory, each in a process of its own; gradients are included.
CPU time on one thread, with and without taking turns: the median over rounds of their ratio.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from memspan.models import LanguageModel
from memspan.models.registry import MODELS
from memspan.training.estimate import Tally
from peak_memory import peak_bytes, reset_peak
from timing import interleaved, machine

RESULTS = Path(__file__).resolve().parent / "results" / "recompute.json"
SIZE = {"n_layers": 8, "d_model": 128, "n_heads": 4, "d_ff": 512, "memory_length": 256}
ROWS, LENGTH = 8, 256


def work(architecture: str, recompute: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    kind = MODELS[architecture]
    names = {field.name for field in dataclasses.fields(kind)}
    options = {name: value for name, value in SIZE.items() if name in names}
    model = LanguageModel(256, kind(**options, dropout=0.1)).train()
    model.recompute = recompute
    tokens = torch.randint(256, (ROWS, LENGTH))
    with torch.no_grad():
        memory = model(tokens).memory

    def call() -> None:
        model.zero_grad()
        model(tokens, memory, targets=tokens).loss.backward()

    return call


def living(architecture: str, recompute: bool) -> float:
    """Megabytes of tensors."""
    call = work(architecture, recompute)
    with Tally() as counted:
        call()
    return counted.peak / 1e6


def peak(architecture: str, recompute: bool) -> float:
    """Megabytes, in a fresh process."""
    command = [sys.executable, __file__, "--peak", architecture, str(int(recompute))]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="JSON")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak:
        architecture, recompute = options.peak
        call = work(architecture, recompute == "1")
        reset_peak()
        before = peak_bytes()
        call()
        print((peak_bytes() - before) / 1e6)
        return
    rows = []
    for architecture in MODELS:
        calls = {"plain": work(architecture, False), "recomputed": work(architecture, True)}
        seconds = interleaved(calls, options.rounds)
        pairs = zip(seconds["recomputed"], seconds["plain"], strict=True)
        row = {
            "architecture": architecture,
            "tensors": living(architecture, False),
            "tensors_recomputed": living(architecture, True),
            "process": peak(architecture, False),
            "process_recomputed": peak(architecture, True),
            "time": median(slow / fast for slow, fast in pairs),
        }
        rows.append(row)
        print(
            f"{architecture:<16} {row['tensors']:4,.0f} MB of tensors, process {row['process']:4,.0f}; "
            f"recomputed {row['tensors_recomputed']:4,.0f} and {row['process_recomputed']:4,.0f} in "
            f"{row['time']:.2f} of the time",
            flush=True,
        )
    options.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
