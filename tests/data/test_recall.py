"""The corpus ``recall``: its answers are those that were told last, and it is the same everywhere."""

from __future__ import annotations

import hashlib
import re

from memspan.lab.data.corpora import load_corpus
from memspan.lab.data.recall import FILLER, NAMES, PLACES, SENTENCES, recall_text


def test_an_answer_is_in_the_last_fact_and_nowhere_else() -> None:
    places: dict[str, str] = {}
    asked: set[str] = set()
    counts = {"facts": 0, "questions": 0, "others": 0}
    for sentence in re.findall(r"\S[^.]*\.", recall_text(2000, 0)):
        if fact := re.fullmatch(r"(\w+) is in (\w+)\.", sentence):
            counts["facts"] += 1
            places[fact[1]] = fact[2]
            asked.discard(fact[1])
        elif question := re.fullmatch(r"Where is (\w+)\? (\w+)\.", sentence):
            counts["questions"] += 1
            assert places[question[1]] == question[2]
            assert question[1] not in asked
            asked.add(question[1])
        else:
            counts["others"] += 1
            assert sentence == FILLER
    assert {*places} == {*NAMES}
    assert {*places.values()} <= {*PLACES}
    assert sum(counts.values()) == 2000
    assert counts["questions"] > 400


def test_the_corpus_is_the_same_on_every_machine() -> None:
    splits = load_corpus("recall").splits
    texts = {name: b"".join(text.read() for text in texts) for name, texts in splits.items()}
    assert {name: text.count(b".") for name, text in texts.items()} == SENTENCES
    assert hashlib.sha256(texts["validation"]).hexdigest().startswith("af54b56cdc29013a")
    assert texts["test"] != texts["validation"]
