"""Bad flags, presets and files: one line that says what to do, and status 2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from command_line import harm, refused
from memspan import cli

pytestmark = [pytest.mark.hardening, pytest.mark.usefixtures("text_file")]


MISTAKES = {
    "train --data.corpus nowhere.txt": "no corpus, file, folder or glob",
    "train --data.corpus tiny-shakespear": "did you mean tiny-shakespeare",
    "train --data.corpus empty.txt": "is empty",
    "train --data.corpus latin1.txt --data.tokenizer characters": "tokenizer bytes",
    "train --data.corpus text.txt --train.batch-size 99999": "rows",
    "train --data.corpus text.txt --train.device cuda:9": "device",
    "train --preset nope": "no preset",
    "train --preset broken.toml": "not valid TOML",
    "train --resume nowhere": "no run at",
    "train --dry-run --init-from nowhere": "no run at",
    "evaluate nowhere": "no run at",
    "evaluate shakespeare --corpus text.txt --field x": (
        "field 'x' is for JSON Lines, CSV, Parquet and data sets, which text.txt is not: drop it"
    ),
    "frobnicate": "unknown verb",
    "train --model rnn": "there is no --model rnn: use one of transformer-xl,",
    "data frobnicate": "unknown verb",
    "data prepare text.txt --vocab-size 500": "words and subwords",
    "data prepare": "corpus is missing: name one",
    "train --train.steps 0": "steps must be at least 1, not 0; memspan",
    "train --optim.learning-rate inf": "learning_rate must be a finite number",
    "train --model feedback --model.max-distance 9": "exceeds the position",
    "train --train.first-segment-length 8": "needs both first_segment_length",
    "train --model feedback --preset mine.toml": "is for compressive",
    "evaluate run --split most": "one of auto, train, validation, test, all, not 'most'",
    "generate run --temperature nan": "temperature must be a finite number",
    f"generate run --seed {10**30}": "seed must be at most 2^63 - 1",
    "train --out=": "--out names the current or the root folder",
    "train --train.parallel fsdp": "add --nproc 2",
    "train --train.device cpu:7": "there is no device 'cpu:7'",
    # A preset gets the checks of a flag.
    "train --preset unknown.toml": "no option 'model.n_layer': perhaps model.n_layers is meant",
    "train --preset text.toml": "[model] n_layers must be an integer, not 'many'; correct",
    "train --preset none.toml": "steps must be at least 1",
    "train --preset choice.toml": "not 'absolute'",
}
FILES = {
    "empty.txt": b"",
    "latin1.txt": b"caf\xe9 " * 500,
    "broken.toml": b"[train\nsteps=",
    "mine.toml": b'architecture = "compressive"',
    "unknown.toml": b"[model]\nn_layer = 3",
    "text.toml": b'[model]\nn_layers = "many"',
    "none.toml": b"[train]\nsteps = 0",
    "choice.toml": b'[model]\npositions = "absolute"',
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_bad_input_is_one_line(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content in FILES.items():
        Path(name).write_bytes(content)
    assert MISTAKES[arguments] in refused(capsys, *arguments.split())


@pytest.mark.parametrize("name", ["config.toml", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped"])
def test_a_damaged_run_is_refused(
    run: Path, name: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    harm(run / name, damage)
    if (name, damage) == ("config.toml", "flipped"):
        refused(capsys, "train", "--resume", run)
    else:
        assert name in refused(capsys, "evaluate", run)


def test_a_damaged_checkpoint_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = sorted((run / "checkpoints").iterdir())[-1]
    harm(newest / "training.safetensors", "flipped")
    line = refused(capsys, "train", "--resume", run)
    assert "training.safetensors" in line
    assert "go on from step" in line


def test_mistakes_are_refused_before_anything_slow_is_imported(run: Path) -> None:
    code = """
import contextlib, sys
from memspan import cli
def refused(*arguments):
    with contextlib.suppress(SystemExit):
        cli.main(list(arguments))
        raise AssertionError(arguments)
refused("generate", "run", "--seed", "-1")
refused("generate", "nowhere")
refused("evaluate", "nowhere")
refused("convert", "nowhere", "out")
refused("evaluate", "run", "--corpus", "nothing.txt")
refused("train", "--train.steps", "0")
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["evaluate", "nowhere", "--debug"])
    assert "Traceback" in capsys.readouterr().err
