"""``memspan train``: what it writes and says, presets, and standard input."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
from pathlib import Path
from unittest import mock

import pytest

import memspan
from command_line import SMALL, TEXT, pipe, printed, refused
from memspan.lab import cli
from memspan.lab.commands import train as train_command
from memspan.lab.commands.train import claimed_folder, new_folder
from memspan.lab.data.options import DataConfig
from memspan.lab.invocation import command
from memspan.lab.runs.options import RunConfig
from memspan.lab.training import terminal
from memspan.models.transformer_xl.config import TransformerXLConfig
from tiny_runs import at_step

pytestmark = pytest.mark.usefixtures("text_file")


@pytest.mark.plots
def test_train_writes_a_run_and_reports(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "PLAIN_SECONDS", 0)
    run = Path("run")
    said = printed(capsys, "train", "--data.corpus", "text.txt", "--out", run, *SMALL)
    assert said.startswith("preparing text.txt\n")
    assert "Lower is better" in said
    words = command("generate", "run", "--prompt", "the quick brown fox", "--min-p", 0.1)
    assert f"\n  {words}\n" in said
    # What was read before the sample is quoted above it.
    assert re.search(r"ends with:\n  \| .+ \nthe model continues:\n", said)
    # This is no terminal: lines stand for the bar.
    assert re.search(r"^step 6/6  loss [\d.]+  [\d.]+ bits/byte  [\d,]+ tokens/s  left", said, re.M)
    assert "bits per byte" in said
    files = "config.toml tokenizer.json model.safetensors metrics.jsonl checkpoints loss.png"
    files += " scores.json samples.jsonl"
    assert {p.name for p in run.iterdir()} == {*files.split()}
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if "validation_bits_per_byte" in r] == [3, 6]
    assert len(list((run / "checkpoints").glob("step-*"))) <= 3


def typed(line: str) -> list[str]:
    """The arguments of a command that was said."""
    words = shlex.split(line)
    program = shlex.split(command())
    assert words[: len(program)] == program
    return words[len(program) :]


def test_commands_on_the_screen_can_be_typed_as_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command that resumes after Ctrl-C, and those shown as next steps."""
    # Without --data.corpus: what is trained on with no options comes along.
    # The status is that of a process which the signal has ended: what was stopped is not done.
    with (
        at_step(3, lambda _: os.kill(os.getpid(), signal.SIGTERM)),
        pytest.raises(SystemExit, match=f"^{128 + signal.SIGTERM}$"),
    ):
        cli.main(["train", "--out", "runs/a b", *SMALL])
    said = capsys.readouterr().out
    resume = typed(said.partition("continue with: ")[2])
    assert resume == ["train", "--resume", "runs/a b"]
    said = printed(capsys, *resume)
    assert said.startswith("preparing runs/a b\nresuming runs/a b at step 4")
    generate, evaluate, measure = map(typed, said.partition("\nnext:\n")[2].splitlines())
    assert printed(capsys, *generate).startswith("PROSPERO:")
    assert "bits per byte" in printed(capsys, *evaluate, "--tokens", "100")
    assert "measure.json" in printed(capsys, *measure, "--longest", "16", "--budget", "1")


def test_a_text_with_nothing_to_learn_is_not_praised(capsys: pytest.CaptureFixture[str]) -> None:
    Path("noise").write_bytes(random.Random(1).randbytes(20_000))
    noise = ["train", "--data.corpus", "noise", *SMALL, "--train.evaluate-tokens", "0"]
    said = printed(capsys, *noise)
    assert "Lower is better: memory is not used yet.\n" in said
    assert "compressor does" not in said


def test_config_toml_gives_back_every_option(run: Path) -> None:
    """But for what flags override."""
    cli.main(["train", "--preset", "run/config.toml", "--train.seed", "7", "--out", "other"])
    config, other = (Path(folder, "config.toml").read_text() for folder in ("run", "other"))
    assert other == config.replace("seed = 1", "seed = 7") != config


def test_a_runs_folder_is_named_after_its_text() -> None:
    for corpus, name in [("a/b c.txt", "b-c"), ("books/*.txt", "books"), ("**/*", "text")]:
        config = RunConfig(model=TransformerXLConfig(), data=DataConfig(corpus=corpus))
        assert new_folder(config) == Path("runs") / f"transformer-xl-{name}-1"


def test_a_text_from_standard_input_is_kept_beside_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    new = ["train", *SMALL, "--data.corpus", "-", "--out", "runs/v1.5"]
    pipe(monkeypatch, b"")
    assert "standard input is empty" in refused(capsys, *new)
    assert not Path("runs/v1.5.txt").exists()
    pipe(monkeypatch, TEXT)
    cli.main(new)
    assert Path("runs/v1.5.txt").read_bytes() == TEXT
    cli.main(["train", "--resume", "runs/v1.5", "--train.steps", "7"])
    assert memspan.load("runs/v1.5").step == 7
    pipe(monkeypatch, TEXT)
    assert "runs/v1.5.txt, which exists" in refused(capsys, *new)


def test_trainings_that_start_at_once_have_folders_of_their_own() -> None:
    """A refused training leaves none."""
    config = RunConfig(model=TransformerXLConfig(), data=DataConfig("text.txt"))
    # What another process makes after this one has looked for a name.
    taken = [Path("runs/transformer-xl-text-1"), Path("runs/transformer-xl-text-2")]
    with mock.patch.object(train_command, "new_folder", side_effect=taken):
        taken[0].mkdir(parents=True)
        assert claimed_folder(config) == taken[1]
    assert claimed_folder(config).name == "transformer-xl-text-3"
    with pytest.raises(SystemExit):
        cli.main(["train", "--data.corpus", "text.txt", *SMALL, "--train.batch-size", "100000"])
    assert len(list(Path("runs").iterdir())) == 3
