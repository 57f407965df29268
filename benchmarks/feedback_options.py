"""What dropout, post-norm and a second thread do to a training step of Feedback, memspan alone.

    python benchmarks/feedback_options.py                     -> results/feedback-options.json
    python benchmarks/feedback_options.py --threads 1 2       wall time, on an otherwise idle machine

Forward and backward at the size T64 of throughput.py: 4 layers of width 128, 16 rows. Options take
turns. On one thread CPU time is taken, on several wall time. Ratios are to the first row, that of
pre-norm without dropout on the first number of threads: median of the rounds, lowest and highest.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

from memspan.models import Feedback
from memspan.models.feedback.config import FeedbackConfig
from timing import interleaved, ratio, write

RESULTS = Path(__file__).resolve().parent / "results" / "feedback-options.json"
DROPOUT: dict[str, Any] = {"dropout": 0.1, "attention_dropout": 0.1}
OPTIONS: dict[str, dict[str, Any]] = {
    "pre-norm": {},
    "pre-norm, dropout": DROPOUT,
    "post-norm": {"normalisation": "post"},
    "post-norm, dropout": DROPOUT | {"normalisation": "post"},
}
Key = tuple[str, int]
"""An option and a number of threads."""


def step(options: dict[str, Any]) -> Callable[[], None]:
    torch.manual_seed(0)
    size = FeedbackConfig(
        n_layers=4, d_model=128, n_heads=4, d_ff=512, memory_length=128, **options
    )
    model = Feedback(size)
    x = torch.randn(16, 64, 128)

    def call() -> None:
        model(x).hidden.square().mean().backward()
        model.zero_grad(set_to_none=True)

    return call


@contextlib.contextmanager
def threads(key: Key) -> Iterator[None]:
    """In as many threads as the key says."""
    before = torch.get_num_threads()
    torch.set_num_threads(key[1])
    yield
    torch.set_num_threads(before)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1], metavar="N")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="JSON")
    given = parser.parse_args()
    calls = {(name, n): step(options) for n in given.threads for name, options in OPTIONS.items()}
    clock = time.process_time if given.threads == [1] else time.perf_counter
    times = interleaved(calls, given.rounds, within=threads, clock=clock)
    first = next(iter(times.values()))
    rows = []
    for (name, n), seconds in times.items():
        r = ratio(seconds, first)
        rows.append(
            {
                "options": name,
                "threads": n,
                "milliseconds": round(1000 * median(seconds), 1),
                "ratio": round(r.middle, 3),
                "low": round(r.low, 3),
                "high": round(r.high, 3),
                "rounds": len(seconds),
            }
        )
        print(
            f"{name:20} {n} thread{'s' * (n > 1)}  {1000 * median(seconds):7.1f} ms  "
            f"{r.middle:.2f} ({r.low:.2f}-{r.high:.2f})"
        )
    write(given.out, rows)


if __name__ == "__main__":
    main()
