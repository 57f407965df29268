"""Speed and memory of memspan against its peers: one table, and results/latest.json.

Training is forward, loss, backward and an AdamW step with full memory; evaluation reads consecutive
segments without gradients; generation reads one token per step. One thread, process CPU time,
interleaved rounds; a ratio above 1 means that memspan is faster. Before anything is timed, memspan
and labml must compute the same logits from the same weights.

Usage: python benchmarks/throughput.py [--sizes S M L] [--work train evaluate generate]
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import platform
import resource
import subprocess
import sys
import warnings
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from peers.ours import Ours
from peers.sizes import SIZES, VOCAB
from timing import compare

HERE = Path(__file__).parent
PEERS = ("labml_xl", "gpt", "x_transformers_xl")
CALLS = {"train": 1, "evaluate": 2, "generate": 20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--work", nargs="+", choices=CALLS, default=list(CALLS))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default 7)")
    parser.add_argument("--json", type=Path, default=HERE / "results/latest.json")
    parser.add_argument("--peak", nargs=2, metavar=("SIDE", "SIZE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    if options.peak:
        print(peak_here(*options.peak))
        return

    rows = []
    for name in options.sizes:
        size, ours = SIZES[name], Ours(SIZES[name])
        tokens = torch.randint(VOCAB, (size.batch, size.segment + 1))
        segment = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        mine = peak("ours", name) if "train" in options.work else None
        for module in options.peers:
            adapter = importlib.import_module(f"peers.{module}")
            peer = adapter.make(size, ours)
            for work in options.work:
                batches = [(name, size.batch)]
                if work == "generate":
                    batches = [(name, 1)] + ([(f"{name}-batch8", 8)] if name == "L" else [])
                for label, batch in batches:
                    if work == "generate":
                        if not hasattr(peer, "generator"):
                            continue
                        sides = ours.generator(batch), peer.generator(batch)
                        per_call = batch
                    else:
                        kind = {"train": "trainer", "evaluate": "evaluator"}[work]
                        sides = getattr(ours, kind)(*segment), getattr(peer, kind)(*segment)
                        per_call = size.batch * size.segment
                    result = compare(*sides, options.rounds, CALLS[work])
                    row = {
                        "architecture": "transformer-xl",
                        "work": work,
                        "size": label,
                        "peer": adapter.PEER,
                        "ratio": round(result.ratio, 2),
                        "low": round(result.low, 2),
                        "high": round(result.high, 2),
                        "tokens_per_second": round(per_call / result.seconds),
                        "peak_megabytes": mine if work == "train" else None,
                    }
                    if work == "train":
                        row["peer_peak_megabytes"] = peak(module, name)
                    rows.append(row)
                    print(json.dumps(row), file=sys.stderr, flush=True)
    show(rows)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "command": f"python benchmarks/throughput.py {' '.join(sys.argv[1:])}".strip(),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "threads": 1,
        "rows": rows,
    }
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {options.json}")


def peak(side: str, size: str) -> float:
    """Megabytes that training adds, in a process of its own."""
    command = [sys.executable, __file__, "--peak", side, size]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout)


def peak_here(side: str, name: str) -> float:
    size, ours = SIZES[name], Ours(SIZES[name])
    model = ours if side == "ours" else importlib.import_module(f"peers.{side}").make(size, ours)
    tokens = torch.randint(VOCAB, (size.batch, size.segment))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = model.trainer(tokens, tokens)
    for _ in range(3):
        step()
    return round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, 1)


def show(rows: list[dict]) -> None:
    table = Table("work", "size", "peer", "ratio", "low-high", "tokens/s", "peak MB", "peer's MB")
    for row in rows:
        table.add_row(
            row["work"],
            row["size"],
            row["peer"],
            f"{row['ratio']:.2f} x",
            f"{row['low']:.2f}-{row['high']:.2f}",
            f"{row['tokens_per_second']:,}",
            *(
                f"{row[k]:,.0f}" if row.get(k) else ""
                for k in ("peak_megabytes", "peer_peak_megabytes")
            ),
        )
    Console().print(table)


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor()


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main()
