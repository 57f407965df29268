"""What a blind start costs: shipped runs scored with memory carried, and emptied before every segment.

    python benchmarks/blind_start.py

Nats per byte on the last tenth of Tiny Shakespeare, in one stream. docs/measured/gated_delta_net.md
has the table.
"""

from __future__ import annotations

import numpy as np
import torch

import memspan
from memspan.data.named import HELD_OUT
from memspan.evaluation import score_tokens

RUNS = ("shakespeare-gated-delta-net", "shakespeare-fast-weights")


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    text = np.frombuffer(HELD_OUT.read_bytes(), np.uint8)
    print("| run | carried | emptied in scoring | |")
    print("| --- " * 4 + "|")
    for name in RUNS:
        run = memspan.load(name)
        length = run.config.train.segment_length
        carried, emptied = (
            score_tokens(
                run.model,
                text,
                run.tokenizer,
                document_starts=starts,
                batch_size=1,
                segment_length=length,
            ).nats_per_token
            for starts in (None, np.arange(0, len(text), length))
        )
        print(f"| `{name}` | {carried:.3f} | {emptied:.3f} | {emptied - carried:.3f} |")


if __name__ == "__main__":
    main()
