"""Bad flags, presets and files: one line that says what to do, status 2, and nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import harm, refused
from memspan.lab import cli

pytestmark = [pytest.mark.hardening, pytest.mark.usefixtures("text_file", "models")]

MISTAKES = {
    "frobnicate": "unknown verb 'frobnicate': use train, evaluate,",
    "trian": "unknown verb 'trian': perhaps train is meant",
    "--verison": "unknown verb '--verison': perhaps --version is meant",
    "--model lstm train": "--model comes before the verb: write it after one",
    "data lst": "unknown verb 'data lst': perhaps data list is meant",
    "evaluate shakespear": "no run at shakespear: perhaps shakespeare is meant",
    "evaluate runn": "no run at runn: perhaps run is meant",
    "train --preset tiny-shakespeare-lst": "perhaps tiny-shakespeare-lstm is meant",
    "train --data.corpus txet.txt": "or glob 'txet.txt': perhaps text.txt is meant",
    "train --data.corpus text.txt --out text.txt": "--out text.txt is not a folder",
    "generate run --save-memory text.txt": "text.txt exists and is not a memory file",
    "convert text.txt out": "there is no folder text.txt",
    "check shakspeare": "there is no shakspeare: perhaps shakespeare is meant",
    "check run --scripts text.txt": "--scripts text.txt is not a folder",
    "evaluate run --per-token text.txt": "text.txt exists",
    "train --data.corpus nowhere.txt": "no corpus, file, folder or glob",
    "train --data.corpus tiny-shakespear": "perhaps tiny-shakespeare is meant",
    "train --data.corpus empty.txt": "is empty",
    "train --data.corpus latin1.txt --data.tokenizer characters": "tokenizer bytes",
    "train --data.corpus text.txt --train.batch-size 99999": "rows",
    "train --data.corpus text.txt --train.device cuda:9": "device",
    "train --data.corpus text.txt --out run": "holds a run already",
    "train --data.corpus - --out /": "root folder",
    "train --out=": "--out names the current or the root folder",
    "train --dry-run --init-from nowhere": "no run at",
    "train --model rnn": "there is no --model rnn: use one of transformer-xl,",
    "train --model feedback --model.max-distance 9": "exceeds the position",
    "train --model feedback --preset mine.toml": "is for compressive",
    "train --optim.learning-rate inf": "learning_rate must be a finite number",
    "train --train.device cpu:7": "there is no device 'cpu:7'",
    "train --train.first-segment-length 8": "needs both first_segment_length",
    "train --train.parallel fsdp": "add --nproc 2",
    # A preset gets the checks of a flag.
    "train --preset nope": "no preset",
    "train --preset broken.toml": "not valid TOML",
    "train --preset unknown.toml": "no option 'model.n_layer': perhaps model.n_layers is meant",
    "train --preset text.toml": "[model] n_layers must be an integer, not 'many'; correct",
    "train --preset none.toml": "steps must be at least 1",
    "train --preset choice.toml": "not 'absolute'",
    "train --resume nowhere": "no run at",
    # What a run cannot change.
    "train --resume run": "is finished: it has made 6 steps, and train.steps is 6; to continue: ",
    "train --resume run --train.steps 5": "train --resume run --train.steps 15",
    "train --resume run --train.batch-size 4": "each row of the batch has its own memory",
    "train --resume run --train.seed 5": "--train.seed cannot change",
    "train --resume run --train.evaluate-tokens 9": "the best score so far is of those tokens",
    "train --resume run --model.memory-length 6": "--model.memory-length cannot change from 8 to 6",
    "train --resume run --model feedback": "is of architecture transformer-xl: drop --model feedback",
    "train --resume run --out other": "drop --out",
    "train --resume run --preset p.toml": "drop --preset",
    "train --resume run --data.corpus nowhere.txt": (
        "nowhere.txt: give its new path with --data.corpus"
    ),
    "evaluate nowhere": "no run at",
    "evaluate run --clamp-length 0": "clamp_length must be at least 1",
    "evaluate run --per-token no/x.jsonl": "no folder no: check --per-token",
    "evaluate run --batch-size 9999 --per-token none.jsonl": "lower",
    "evaluate shakespeare --corpus text.txt --field x": (
        "field 'x' is for JSON Lines, CSV, Parquet and data sets, which text.txt is not: drop it"
    ),
    "generate run --clamp-length 0": "clamp_length must be at least 1",
    "generate run --memory nowhere": "missing",
    "generate run --temperature nan": "temperature must be a finite number",
    f"generate run --seed {10**30}": "seed must be at most 2^63 - 1",
    "measure run --budget 1e-9": "too small to measure anything of run",
    "measure run --budget 0": "budget must be more than 0",
    "measure run --corpus tiny.txt": "needs at least 32",
    "measure run --out text.txt": "--out text.txt is not a folder",
    "measure run --tokenizer bytes": "has its own tokeniser",
    "measure nowhere": "nowhere",
    "measure run/checkpoints": "neither a run",
    "measure text.txt": "text.txt is a file, neither a run nor a model",
    "measure models.py:few": (
        "has 64 tokens and no tokeniser, and bytes are 256: give its tokeniser"
    ),
    "measure models.py:few --tokenizer bytes": (
        "has 64 tokens, and this tokeniser's ids go beyond them"
    ),
    "measure models.py:headless": (
        "where logits are [B, T, 256]: give one with a language model's head"
    ),
    "measure models.py:gru": "reads vectors, and a text is tokens: give a language model",
    "measure models.py:made --precision bfloat16": "is not a run: drop --precision",
    "measure models.py:made --field body --corpus text.txt": "drop it",
    "measure models.py:made --tokenizer missing.json": "cannot read missing.json",
    "check": "target must be given: add what is missing",
    "check nowhere": "there is no nowhere: give a run (recall-compressive, recall-fast-weights,",
    "check nowhere.py:x": "no file nowhere.py",
    "check models.py:nobody": "models.py has no nobody",
    "check models.py:stops": "models.py:stops stopped with OSError: no weights",
    "check models.py:both_ways": "make it with bidirectional=False",
    "check models.py:linear": "Linear has no state that is known here",
    "check models.py:Hidden": "Hidden cannot be read: ",
    "check models.py:gru --laws cuts,cut": "there is no law 'cut'",
    "check models.py:gru --budget 0": "budget must be a positive number",
    "check models.py:gru --device nowhere": "there is no device 'nowhere' here: use cpu",
    "data frobnicate": "unknown verb",
    "data prepare": "corpus is missing: name one",
    "data prepare text.txt --vocab-size 500": "words, subwords and ids",
}
FILES = {
    "empty.txt": b"",
    "tiny.txt": b"tiny",
    "latin1.txt": b"caf\xe9 " * 500,
    "broken.toml": b"[train\nsteps=",
    "mine.toml": b'architecture = "compressive"',
    "unknown.toml": b"[model]\nn_layer = 3",
    "text.toml": b'[model]\nn_layers = "many"',
    "none.toml": b"[train]\nsteps = 0",
    "choice.toml": b'[model]\npositions = "absolute"',
}


def contents() -> dict[Path, bytes]:
    """All files here but those of caches."""
    files = (p for p in Path().rglob("*") if p.is_file() and "cache" not in str(p))
    return {path: path.read_bytes() for path in files}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_bad_input_is_one_line(
    run: Path, arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in FILES.items():
        Path(name).write_bytes(content)
    before = contents()
    assert MISTAKES[arguments] in refused(capsys, *arguments.split())
    assert contents() == before


@pytest.mark.parametrize("name", ["config.toml", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped"])
def test_a_damaged_run_is_refused(
    run: Path, name: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if (name, damage) == ("config.toml", "flipped"):
        config = run / name
        config.write_text(config.read_text().replace("seed = 1", "seed = 2"))
        assert "has changed" in refused(capsys, "train", "--resume", run)
    else:
        harm(run / name, damage)
        assert name in refused(capsys, "evaluate", run)


def test_a_damaged_checkpoint_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = sorted((run / "checkpoints").iterdir())[-1]
    harm(newest / "training.safetensors", "flipped")
    line = refused(capsys, "train", "--resume", run)
    assert "training.safetensors" in line
    assert "continue from step" in line


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["evaluate", "nowhere", "--debug"])
    assert "Traceback" in capsys.readouterr().err
