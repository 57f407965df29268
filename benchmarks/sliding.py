"""Evaluation with memory against a window that slides by one token (Dai et al. 2019, table 9).

To give every token the same left context, a transformer without memory reads its entire window again
for each token. Transformer-XL reads segments and carries its memory. Both sides have the same sizes and
attention length; time is CPU time per scored token, one thread, batch of one, sides taking turns.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from memspan.models import LanguageModel
from memspan.models.transformer_xl.config import TransformerXLConfig
from peers.gpt import GPT
from peers.side import VOCAB_SIZE
from timing import interleaved, ratio, write

SEGMENT = 128


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[800, 1800, 2800, 3800],
        help="attention lengths, more than 128 (default: the paper's, 800 1800 2800 3800)",
    )
    parser.add_argument("--layers", type=int, default=6, help="layers (default: 6)")
    parser.add_argument("--width", type=int, default=256, help="width, 8 heads (default: 256)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default: 5)")
    parser.add_argument(
        "--json",
        type=Path,
        default=Path(__file__).resolve().parent / "results" / "sliding.json",
        metavar="PATH",
        help="where the rows go (default: benchmarks/results/sliding.json)",
    )
    options = parser.parse_args()
    if min(options.lengths) <= SEGMENT:
        parser.error(f"--lengths must be more than {SEGMENT}")
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    rows = []
    table = Table("attention length", "sliding, tokens/s", "memory, tokens/s", "times faster")
    for length in options.lengths:
        xl = TransformerXLConfig(
            n_layers=options.layers,
            d_model=options.width,
            n_heads=8,
            d_ff=4 * options.width,
            memory_length=length - SEGMENT,
        )
        ours = LanguageModel(VOCAB_SIZE, xl).eval()
        plain = GPT(VOCAB_SIZE, length, options.layers, 8, options.width, 4 * options.width).eval()
        text = torch.randint(VOCAB_SIZE, (1, length), generator=generator)
        reader = ours.reader(batch_size=1)
        for segment in text.split(SEGMENT, 1):
            reader.read(segment)
        segment = text[:, :SEGMENT]
        with torch.no_grad():
            sides = {"sliding": partial(plain, text), "memory": partial(reader.read, segment)}
            times = interleaved(sides, options.rounds)
        # A call scores one token on one side and a segment on the other.
        per_token = [t / SEGMENT for t in times["memory"]]
        r = ratio(times["sliding"], per_token)
        speeds = (1 / median(times["sliding"]), 1 / median(per_token))
        rows.append(
            {
                "attention_length": length,
                "ratio": round(r.middle, 1),
                "low": round(r.low, 1),
                "high": round(r.high, 1),
                "sliding_tokens_per_second": round(speeds[0], 2),
                "tokens_per_second": round(speeds[1], 1),
            }
        )
        table.add_row(f"{length:,}", f"{speeds[0]:.2f}", f"{speeds[1]:,.0f}", f"{r.middle:,.0f}")
    Console().print(table)
    write(options.json, rows)
    print(f"written: {options.json}")


if __name__ == "__main__":
    main()
