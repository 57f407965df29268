"""Journeys of users with a run and a text, and the end that each must have.

A journey ends well, with a result that makes sense, or with status 2 and one line that says what to do:
where that line is expected says :func:`refusal_of`. All else is a fault.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from texts import TEXTS, corpus
from twins import CONVERTED, OF_WORDS, options_of

import memspan
from memspan.lab import cli
from memspan.lab.runs.folder import SHIPPED

LEARNS = {"train", "resume"}
SHORT = {"60-characters", "107-characters"}


def refusal_of(run: str, verb: str, text: str) -> str | None:
    """Words of the line with which this journey ends (None: it ends well)."""
    if verb == "resume" and run in SHIPPED:
        return "is never changed: train a run of your own"
    if text == "no-text" and run in OF_WORDS:
        return "not UTF-8"
    if verb not in {"generate", "memory"} and text == "0-characters":
        return r"is empty|no text to score|has no text|needs at least"
    if verb == "measure" and text == "1-characters":
        return r"needs at least \d+"
    if verb in LEARNS and text == "1-characters":
        return r"give more text|has no text|too few|vocabulary"
    return None


def too_few(verb: str, text: str, line: str) -> bool:
    """A text that is short for a run's segments or its tokens, which differ, may be refused."""
    return (
        verb in LEARNS | {"measure"}
        and text in SHORT
        and re.search(r"too few|give more|lower|needs at least", line) is not None
    )


@dataclass
class Journey:
    """One run, one text, in an empty folder."""

    name: str
    """The run's."""
    run: Path
    text: str
    folder: Path
    capsys: pytest.CaptureFixture[str]

    def corpus(self) -> Path:
        return corpus(self.text, self.folder)

    def prompt(self) -> list[str]:
        """Options that have the whole text read: a file and, of several parts, a prompt after it."""
        first, *more = TEXTS[self.text]
        path = self.folder / "prompt.txt"
        path.write_bytes(first)
        after = b"".join(more).decode()
        return ["--prompt-file", str(path), *(["--prompt", after] if after else [])]

    def n_tokens(self, run: memspan.Run) -> int:
        """Tokens of the prompt: an empty one is the tokeniser's opening."""
        whole = b"".join(TEXTS[self.text]) or run.tokenizer.opening
        return sum(len(ids) for ids in run.tokenizer.encode_stream([whole]))

    def calls(self, *arguments: object) -> str:
        """Output of the command; a refusal raises MemspanError, and any other end is a failure."""
        self.capsys.readouterr()
        status: object = 0
        try:
            cli.main([str(a) for a in arguments])
        except SystemExit as stop:
            status = stop.code
        said = self.capsys.readouterr()
        assert "Traceback" not in said.err
        assert "unexpected" not in said.err, said.err
        if status:
            assert status == 2, said.err
            (line,) = [
                line for line in said.err.splitlines() if not line.startswith("memspan: compiling")
            ]
            raise memspan.MemspanError(line.removeprefix("memspan: "))
        return said.out


def generate(journey: Journey) -> None:
    said = journey.calls(
        "generate", journey.run, *journey.prompt(), "--tokens", 5, "--samples", 2, "--json"
    )
    samples = json.loads(said)["samples"]
    assert [len(sample["tokens"]) for sample in samples] == [5, 5]


def memory(journey: Journey) -> None:
    saved = journey.folder / "saved.memory"
    run = memspan.load(journey.run)
    read = ["--tokens", 3, "--save-memory", saved]
    journey.calls("generate", journey.run, *journey.prompt(), *read)
    n = journey.n_tokens(run) + 3
    assert int(run.model.load_memory(saved).tokens_seen) == n
    more = ["--memory", saved, *journey.prompt(), "--force"]
    journey.calls("generate", journey.run, *read, *more)
    assert int(run.model.load_memory(saved).tokens_seen) == 2 * n


def evaluate(journey: Journey) -> None:
    """Score a text; a model without memory with a sliding window."""
    window = ["--window", 16] if journey.name == "tiny-shakespeare-transformer" else []
    said = journey.calls(
        "evaluate", journey.run, "--corpus", journey.corpus(), "--split", "all", "--json", *window
    )
    scores = json.loads(said)
    tokenizer = memspan.load(journey.run).tokenizer
    n = sum(len(ids) for part in TEXTS[journey.text] for ids in tokenizer.encode_stream([part]))
    # Splits of a text are tokenised apart, and a border between two of them may cut a word.
    assert 0 <= scores["tokens"] - n <= (5 if journey.name in OF_WORDS else 0)
    assert math.isfinite(scores["nats_per_token"])


def measure(journey: Journey) -> None:
    journey.calls(
        "measure", journey.run, "--corpus", journey.corpus(), "--split", "all",
        "--longest", 32, "--budget", 2, "--out", journey.folder / "report",
    )  # fmt: skip
    (found,) = json.loads((journey.folder / "report" / "measure.json").read_text())["runs"]
    assert found["left_out"] or found["span"]


SMALL = ["--train.batch-size", "2", "--train.sample-tokens", "2", "--train.device", "cpu"]


def train(journey: Journey) -> None:
    own = options_of(journey.name, journey.run, journey.folder)
    out = journey.folder / "new"
    journey.calls(
        "train", "--preset", own, "--data.corpus", journey.corpus(), "--out", out, *SMALL,
        "--train.evaluate-tokens", 32, "--train.segment-length", 16, "--train.steps", 2,
    )  # fmt: skip
    assert memspan.load(out).step == memspan.load(out / "checkpoints/best").step > 0


def resume(journey: Journey) -> None:
    """A run on this text goes on; a converted one begins to."""
    folder = journey.run
    options = []
    if journey.name == CONVERTED:
        folder = Path(shutil.copytree(folder, journey.folder / "copy"))
        options = ["--data.corpus", journey.corpus(), "--train.segment-length", 16, *SMALL]
    elif journey.name not in SHIPPED:
        train(journey)
        folder = journey.folder / "new"
    journey.calls("train", "--resume", folder, "--train.steps", 3, *options)
    assert memspan.load(folder).step
    assert "best weights in" in journey.calls("export", folder)


VERBS: dict[str, Callable[[Journey], None]] = {
    verb.__name__: verb for verb in (generate, evaluate, memory, train, resume, measure)
}


def travel(verb: str, journey: Journey) -> None:
    """Run the journey; it must end as the table says."""
    line = refusal_of(journey.name, verb, journey.text)
    if line is not None:
        with pytest.raises(memspan.MemspanError, match=line):
            VERBS[verb](journey)
        return
    try:
        VERBS[verb](journey)
    except memspan.MemspanError as error:
        if not too_few(verb, journey.text, str(error)):
            raise
