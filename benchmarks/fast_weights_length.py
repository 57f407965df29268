"""What a token costs the Fast Weights transformer in training, from short texts to long ones.

    python benchmarks/fast_weights_length.py                  -> results/fast-weights-length.json

One row through one layer of width 128 with 4 heads, dpfp 1, feed-forward 512, forward and backward.
Microseconds of CPU time per token on one thread, the median of the rounds, lengths taking turns; and
peak memory beyond the model and its input, in bytes per token, each in its own process. Measured with
everything saved for backward, and with a part of it recomputed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from memspan.models import LanguageModel
from memspan.models.fast_weights.config import FastWeightsConfig
from peak_memory import peak_bytes, reset_peak
from timing import interleaved, machine

RESULTS = Path(__file__).resolve().parent / "results" / "fast-weights-length.json"
LENGTHS = (256, 1024, 4096, 16_384, 65_536)


def work(length: int, recompute: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    size = FastWeightsConfig(n_layers=1, d_model=128, n_heads=4, d_ff=512, recompute=recompute)
    backbone = LanguageModel(256, size).backbone
    x = torch.randn(1, length, 128)

    def call() -> None:
        backbone(x).hidden.square().mean().backward()

    return call


def peak(length: int, recompute: bool) -> float:
    """Bytes per token, in a fresh process."""
    command = [sys.executable, __file__, "--peak", str(length), str(int(recompute))]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, metavar="T")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="JSON")
    parser.add_argument("--peak", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak:
        length, recompute = options.peak
        work(8, bool(recompute))()
        call = work(length, bool(recompute))
        reset_peak()
        before = peak_bytes()
        call()
        print((peak_bytes() - before) / length)
        return
    rows = []
    for recompute in (False, True):
        calls = {str(n): work(n, recompute) for n in options.lengths}
        for name, seconds in interleaved(calls, options.rounds).items():
            length = int(name)
            row = {
                "tokens": length,
                "recompute": recompute,
                "microseconds_per_token": 1e6 * median(seconds) / length,
                "bytes_per_token": peak(length, recompute),
            }
            rows.append(row)
            print(
                f"{length:>7,} tokens{', recompute' * recompute:<11}  "
                f"{row['microseconds_per_token']:6.1f} us and {row['bytes_per_token']:8,.0f} bytes "
                "per token",
                flush=True,
            )
    options.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
