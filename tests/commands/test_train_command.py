"""``memspan train``: what it writes and says, presets, and standard input."""

from __future__ import annotations

import json
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import memspan
from command_line import SMALL, TEXT, pipe, printed, refused
from memspan import cli
from memspan.commands.train import new_folder
from memspan.data.options import DataConfig
from memspan.invocation import command
from memspan.models.transformer_xl.config import TransformerXLConfig
from memspan.runs.options import RunConfig, read_config
from memspan.training import terminal

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
    assert re.search(r"which ends:\n  \| .+ \nand writes on:\n", said)
    # This is no terminal: lines stand for the bar.
    assert re.search(r"^step 6/6  loss [\d.]+  [\d.]+ bits/byte  [\d,]+ tokens/s  left", said, re.M)
    assert "bits per byte" in said
    files = "config.toml tokenizer.json model.safetensors metrics.jsonl checkpoints loss.png"
    assert {p.name for p in run.iterdir()} == {*files.split()}
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if "validation_bits_per_byte" in r] == [3, 6]
    assert len(list((run / "checkpoints").glob("step-*"))) <= 3


@pytest.mark.processes
def test_commands_on_the_screen_can_be_typed_as_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """That which resumes after Ctrl-C, and those that are said to be next; by a console script which is
    not on the PATH."""
    Path("bin").mkdir()
    script = Path("bin/memspan")
    script.write_text(f"#!{sys.executable}\nfrom memspan.cli import main\nmain()\n")
    script.chmod(0o755)
    steps = ["--train.steps", "300", "--train.evaluate-every", "0", "--train.save-every", "0"]
    # Without --data.corpus: what is trained on with no options comes along.
    start = [script, "train", "--out", "runs/a b", *SMALL, *steps]
    with subprocess.Popen(start, stdout=subprocess.PIPE, text=True) as training:
        assert training.stdout is not None
        metrics = Path("runs/a b/metrics.jsonl")
        while not (metrics.exists() and metrics.stat().st_size):
            assert training.poll() is None
            time.sleep(0.01)
        training.send_signal(signal.SIGINT)
        said = training.stdout.read()
    resume = said.partition("continue with: ")[2].strip()
    assert resume == f"{script} train --resume 'runs/a b'"
    said = subprocess.run(resume, shell=True, check=True, capture_output=True, text=True).stdout
    assert said.startswith("preparing runs/a b\nresuming runs/a b at step ")
    commands = [shlex.split(line) for line in said.partition("\nnext:\n")[2].splitlines()]
    assert {words[0] for words in commands} == {str(script)}
    generate, evaluate, measure = (words[1:] for words in commands)
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
    """Flags override it."""
    config = run / "config.toml"
    assert read_config(config).model.memory_length == 8
    cli.main(["train", "--preset", str(config), "--out", "again"])
    assert config.read_text() == Path("again/config.toml").read_text()
    # The same options and seed: the same weights.
    assert (run / "model.safetensors").read_bytes() == Path("again/model.safetensors").read_bytes()
    cli.main(["train", "--preset", str(config), "--train.seed", "7", "--out", "other"])
    other = Path("other/config.toml").read_text()
    assert other == config.read_text().replace("seed = 1", "seed = 7") != config.read_text()


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
