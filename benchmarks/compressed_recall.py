"""Where recall-compressive is wrong: by the slots that hold a fact when it is asked for.

    python benchmarks/compressed_recall.py

The stories of shipped_recall.py begin with their fact, so its words always stand at the same places of
a segment, and the memory before it is empty. Here 32 to 63 words of other facts are read first: then no
memory is empty, and the fact begins at every place of a segment. Writes
benchmarks/results/compressed-recall.json; docs/guides/trained-runs.md says what it shows.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import torch

import memspan
import shipped_recall
import timing
from memspan.lab.runs.run import Run

RESULTS = timing.RESULTS / "compressed-recall.json"
BETWEEN = (8, 10, 12, 14, 16, 20, 24, 28)
"""Facts about other people between a fact and its question."""
STORIES = 60
"""Stories for each of them and for each number of words before."""
FIRST = 200
"""Stories that begin with the fact."""


def n_right(run: Run, before: int, between: int, stories: int) -> int:
    """The number of right answers to stories with so many words before the fact, and so many facts
    after it."""
    told = [shipped_recall.story(between, seed, before) for seed in range(stories)]
    return shipped_recall.n_right(run, told)


def held(before: int, between: int, length: int) -> str:
    """Name the slot that holds the place when it is asked for; segments, and both memories, are of
    ``length``."""
    place = before + 3
    asked = before + 4 + 4 * between + 2
    age = asked // length - place // length
    if age < 2:
        return "a slot of its own"
    if age > 3:
        return "forgotten"
    # A compressed slot holds words 2n and 2n + 1: "in Rome.", or "Rome." and the next name.
    return "with the word before" if place % 2 else "with the next fact's name"


def main() -> None:
    timing.parser(__doc__).parse_args()
    torch.set_num_threads(1)
    run = memspan.load("recall-compressive")
    length = run.config.train.segment_length
    found: dict[str, dict[int, Any]] = defaultdict(dict)
    for between in BETWEEN:
        words = 4 * between + 3
        counts: dict[str, list[int]] = defaultdict(list)
        for before in range(length, 2 * length):
            right = n_right(run, before, between, STORIES)
            counts[held(before, between, length)].append(right)
            if before % length > length - 4:
                counts[f"{held(before, between, length)}, told across an edge"].append(right)
        if between < 15:  # Later the first segment is compressed.
            found["a slot of its own, the text's first"][words] = (
                n_right(run, 0, between, FIRST) / FIRST
            )
        for how, each in counts.items():
            found[how][words] = sum(each) / (STORIES * len(each))
    for how, row in sorted(found.items()):
        print(f"{how:50}", *(f"{words}: {share:.0%} " for words, share in row.items()))
    rounded = {how: {w: round(share, 4) for w, share in row.items()} for how, row in found.items()}
    RESULTS.write_text(json.dumps(rounded | {"machine": timing.machine()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
