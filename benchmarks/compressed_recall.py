"""Where recall-compressive is wrong: by the slots that hold a fact when it is asked for.

    python benchmarks/compressed_recall.py

The stories of shipped_recall.py begin with their fact, so its words always stand at the same places of
a segment, and the memory before it is empty. Here 32 to 63 words of other facts are read first: then no
memory is empty, and the fact begins at every place of a segment. Writes
benchmarks/results/compressed-recall.json; docs/guides/trained-runs.md says what it shows.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from typing import Any

import torch

import memspan
import timing
from memspan.lab.data.recall import NAMES, PLACES
from memspan.lab.runs.run import Run

RESULTS = timing.RESULTS / "compressed-recall.json"
BETWEEN = (8, 10, 12, 14, 16, 20, 24, 28)
"""Facts about other people between a fact and its question."""
STORIES = 60
"""Stories for each of them and for each number of words before."""
FIRST = 200
"""Stories that begin with the fact."""


def story(before: int, between: int, seed: int) -> tuple[str, str]:
    """So many words of facts about others, a fact, facts about others, its question; its answer."""
    draw = random.Random(seed)
    name, *others = draw.sample(NAMES, len(NAMES))
    place = draw.choice(PLACES)

    def facts(n: int) -> list[str]:
        """Facts of four words each."""
        told = (f"{draw.choice(others)} is in {draw.choice(PLACES)}." for _ in range(n))
        return " ".join(told).split()

    start = facts(-(-before // 4))
    words = [*start[len(start) - before :], name, "is", "in", f"{place}.", *facts(between)]
    return " ".join([*words, "Where", "is", f"{name}?"]), f"{place}."


@torch.no_grad()
def n_right(run: Run, before: int, between: int, stories: int) -> int:
    """The number of stories answered rightly, each read from an empty memory."""
    texts, places = zip(*(story(before, between, seed) for seed in range(stories)), strict=True)
    ids = torch.tensor([run.tokenizer.encode(text.encode()).tolist() for text in texts])
    expected = torch.tensor([run.tokenizer.encode(place.encode())[0] for place in places])
    memory: Any = None
    for segment in ids.split(run.config.train.segment_length, dim=1):
        out = run.model(segment, memory)
        memory = out.memory
    return int((out.logits[:, -1].argmax(-1) == expected).sum())


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
