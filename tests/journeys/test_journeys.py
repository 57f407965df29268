"""Every run, every verb, every text: pairs of them always, all of them before a release."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from pairs import covering, pairs_of
from texts import TEXTS, prose
from twins import RUNS
from verbs import VERBS, Journey, travel

import memspan
from memspan.measurement import attention, repeats, report, span

pytestmark = pytest.mark.hardening
ROWS = list(itertools.product(RUNS, VERBS, TEXTS))
PAIRS = covering(ROWS)
LONGEST = 1_000_000


def _parameters() -> list[object]:
    always = set(PAIRS)
    return [
        pytest.param(
            *row,
            id="-".join(row),
            marks=[
                # A run is made by one worker alone.
                pytest.mark.xdist_group(row[0]),
                *([] if row in always else [pytest.mark.journeys]),
            ],
        )
        for row in ROWS
    ]


@pytest.mark.parametrize(("name", "verb", "text"), _parameters())
def test_a_journey(
    name: str,
    verb: str,
    text: str,
    made: Path,
    own_folders: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # One round of each measurement: no test depends on time. Drawing takes seconds.
    for module, most in ((span, "TARGETS"), (repeats, "STRINGS"), (attention, "TOKENS")):
        monkeypatch.setattr(module, f"MOST_{most}", 1)
    monkeypatch.setattr(report, "picture", lambda *_: b"")
    travel(verb, Journey(name, made, text, own_folders, capsys))


def test_every_pair_is_travelled() -> None:
    assert set().union(*map(pairs_of, PAIRS)) == set().union(*map(pairs_of, ROWS))
    assert len(PAIRS) < len(ROWS) / 5


@pytest.mark.journeys
@pytest.mark.parametrize(
    "name",
    [
        "shakespeare",
        "shakespeare-compressive",
        "shakespeare-fast-weights",
        "shakespeare-feedback",
        "shakespeare-gated-delta-net",
        "tiny-shakespeare-lstm",
        "tiny-shakespeare-transformer",
    ],
)
def test_a_million_characters(
    name: str, made: Path, own_folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one text, for every architecture: read, kept in a memory of the usual size, and scored."""
    Path("long.txt").write_text(prose(LONGEST))
    journey = Journey(name, made, "0-characters", own_folders, capsys)
    options = ["--prompt-file", "long.txt", "--tokens", 5, "--save-memory", "long.memory"]
    journey.calls("generate", made, *options)
    run = memspan.load(made)
    memory = run.model.load_memory("long.memory")
    assert int(memory.tokens_seen) == LONGEST + 5
    assert memory.nbytes == memspan.generate(run, "a", tokens=0).memory.nbytes
    scored = journey.calls("evaluate", made, "--corpus", "long.txt", "--split", "all", "--json")
    assert json.loads(scored)["tokens"] == LONGEST
