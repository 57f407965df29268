"""Sentences that say where somebody is, and ask for it: a text that only a memory can predict.

Twelve people move between twelve places. A *fact* tells where somebody is, a *question* asks for it
and is answered with the place that was told last, and some sentences say nothing. Who has moved lately
moves again most often, so that some facts are overwritten at once and others stand for a hundred words.
Nobody is asked for twice between two moves: an answer is found in the fact and nowhere else.
"""

from __future__ import annotations

import random

from memspan.lab.data.texts import Splits, Text

NAMES = ("Kate", "Tom", "Ann", "Bob", "Eve", "Max", "Ada", "Leo", "Mia", "Sam", "Zoe", "Ian")
PLACES = (
    "Padua", "Rome", "Pisa", "Milan", "Venice", "Turin",
    "Genoa", "Siena", "Verona", "Naples", "Parma", "Lucca",
)  # fmt: skip
FILLER = "It rains."
FILLERS = 0.1
"""Share of the sentences that say nothing."""
QUESTIONS = 0.3
"""Share that are questions, where somebody can be asked for; the rest are facts."""
LINES = 0.1
"""Share of the sentences that end a line."""
SENTENCES = {"train": 180_000, "validation": 10_000, "test": 10_000}


def recall_text(n_sentences: int, seed: int) -> str:
    """Sentences from a generator of random numbers that begins with ``seed``."""
    draw = random.Random(seed).random
    names = list(NAMES)
    """In the order of their last moves, latest first."""
    places: dict[str, str] = {}
    waiting: set[str] = set()
    """Names that were not asked for since their last move."""
    parts = []
    for _ in range(n_sentences):
        kind = draw()
        asked = [name for name in names if name in waiting]
        if kind < FILLERS:
            sentence = FILLER
        elif kind < FILLERS + QUESTIONS and asked:
            name = asked[int(draw() * len(asked))]
            waiting.remove(name)
            sentence = f"Where is {name}? {places[name]}."
        else:
            # A rank on a log scale, from 0.
            name = names.pop(int((len(names) + 1) ** draw()) - 1)
            names.insert(0, name)
            waiting.add(name)
            places[name] = PLACES[int(draw() * len(PLACES))]
            sentence = f"{name} is in {places[name]}."
        parts += [sentence, "\n" if draw() < LINES else " "]
    return "".join(parts[:-1]) + "\n"


def recall_splits() -> Splits:
    """The corpus ``recall``: 3.5 MB, a text of its own for each split."""
    return {
        split: [Text.of(recall_text(n_sentences, seed).encode())]
        for seed, (split, n_sentences) in enumerate(SENTENCES.items())
    }
