"""Every run, every verb, every text: texts in turn always, all of them before a release."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from texts import TEXTS, prose
from twins import RUNS
from verbs import VERBS, Journey, travel

import memspan
from memspan.lab.measurement import report
from memspan.lab.runs.folder import SHIPPED

pytestmark = pytest.mark.hardening
LONGEST = 1_000_000
EACH = itertools.product(enumerate(RUNS), enumerate(VERBS), enumerate(TEXTS))
ROWS = [
    pytest.param(
        run,
        verb,
        text,
        id=f"{run}-{verb}-{text}",
        marks=[
            # A run is made by one worker alone.
            pytest.mark.xdist_group(run),
            # Texts in turn: every run meets every verb, and every verb every text.
            *([pytest.mark.journeys] if (i + j - k) % len(TEXTS) else []),
        ],
    )
    for (i, run), (j, verb), (k, text) in EACH
]


@pytest.mark.parametrize(("name", "verb", "text"), ROWS)
def test_journey_succeeds(
    name: str,
    verb: str,
    text: str,
    made: Path,
    own_folders: Path,
    one_round: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Drawing takes seconds.
    monkeypatch.setattr(report, "picture", lambda *_: b"")
    travel(verb, Journey(name, made, text, own_folders, capsys))


@pytest.mark.journeys
@pytest.mark.parametrize(
    "name", [*SHIPPED, "tiny-shakespeare-lstm", "tiny-shakespeare-transformer"]
)
def test_journey_reads_a_million_characters(
    name: str, made: Path, own_folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every architecture reads one text, keeps it in a memory of the usual size, and scores it."""
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
