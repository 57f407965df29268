"""Half an hour of training, validation and generation in one process: are memory and speed stable?

    python benchmarks/soak.py                                # 30 minutes
    python benchmarks/soak.py --minutes 5 --architecture feedback

`memspan train` with its defaults on the standard library's sources, in this process: every
100 steps a validation and a sample of text, every 200 a checkpoint. A thread records resident memory
and CPU time once per second; when the time is over, it stops the run as Ctrl-C does. The
first tenth is warm-up. Written: results/soak.json and soak.png.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

import plots
import timing
from memspan.lab.data.options import DataConfig
from memspan.lab.runs.options import RunConfig
from memspan.lab.training import metrics, start
from memspan.lab.training.options import TrainConfig
from memspan.models.registry import MODELS
from peak_memory import MIB, growth, resident


class Watch(threading.Thread):
    """Records memory, CPU time and progress once per second, and ends the run in time."""

    def __init__(self, folder: Path, seconds: float) -> None:
        super().__init__(daemon=True)
        self.log = folder / "metrics.jsonl"
        self.seconds = seconds
        self.points: list[dict[str, float]] = []
        self.done = threading.Event()

    def run(self) -> None:
        start = time.monotonic()
        while not self.done.wait(1):
            records = metrics.read(self.log)
            if records:
                point = {"seconds": time.monotonic() - start, "cpu_seconds": time.process_time()}
                point |= {"resident_bytes": resident(), "tokens": records[-1]["tokens"]}
                self.points.append(point)
            if time.monotonic() - start > self.seconds:
                os.kill(os.getpid(), signal.SIGINT)
                return


def speed(points: list[dict[str, float]]) -> float:
    """Tokens trained on per CPU second of the process, validation and saves included."""
    first = points[0]
    last = points[-1]
    return (last["tokens"] - first["tokens"]) / (last["cpu_seconds"] - first["cpu_seconds"])


def plot(points: list[dict[str, float]], path: Path) -> None:
    """Resident memory and speed over time."""
    figure, (above, below) = plots.panels(2, 2.2)
    line = plots.look("transformer-xl") | {"marker": ""}
    minutes = [point["seconds"] / 60 for point in points]
    above.plot(minutes, [point["resident_bytes"] / MIB for point in points], **line)
    above.set(xlabel="minutes", ylabel="resident memory, MiB", ylim=(0, None))
    parts = [points[n : n + 61] for n in range(0, len(points) - 60, 60)]
    below.plot([part[-1]["seconds"] / 60 for part in parts], [speed(p) for p in parts], **line)
    below.set(xlabel="minutes", ylabel="tokens per CPU second", ylim=(0, None))
    plots.save(figure, path)


def main() -> None:
    parser = timing.parser(__doc__, results="soak.json")
    parser.add_argument("--minutes", type=float, default=30, help="how long (default: 30)")
    parser.add_argument("--architecture", choices=MODELS, default="transformer-xl")
    options = parser.parse_args()
    torch.set_num_threads(1)
    loop = TrainConfig(
        steps=10**7, evaluate_every=100, evaluate_tokens=16_384, save_every=200, device="cpu"
    )
    config = RunConfig(
        model=MODELS[options.architecture](),
        architecture=options.architecture,
        data=DataConfig("python-stdlib"),
        train=loop,
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        watch = Watch(folder, options.minutes * 60)
        watch.start()
        try:
            start.train(config, folder, console=Console())
        finally:
            watch.done.set()
            watch.join()
        records = metrics.read(folder / "metrics.jsonl")
    points = watch.points
    warm_up = len(points) // 10
    third = (len(points) - warm_up) // 3
    validations = [r for r in records if "validation_bits_per_byte" in r]
    sizes = [int(point["resident_bytes"]) for point in points]
    result: dict[str, Any] = {
        "machine": timing.machine(),
        "architecture": options.architecture,
        "minutes": points[-1]["seconds"] / 60,
        "steps": records[-1]["step"],
        "tokens": records[-1]["tokens"],
        "validations": len(validations),
        "resident_mib_after_warm_up": sizes[warm_up] / MIB,
        "resident_mib_at_the_end": sizes[-1] / MIB,
        "growth": growth(sizes, warm_up),
        "tokens_per_cpu_second_first_third": speed(points[warm_up : warm_up + third]),
        "tokens_per_cpu_second_last_third": speed(points[-third:]),
        "median_resident_mib": median(sizes) / MIB,
    }
    for name, value in result.items():
        if name != "machine":
            print(f"{name:<36}{value:,.4g}" if isinstance(value, float) else f"{name:<36}{value}")
    options.json.write_text(json.dumps(result | {"points": points}) + "\n", encoding="utf-8")
    plot(points, options.json.with_suffix(".png"))


if __name__ == "__main__":
    main()
