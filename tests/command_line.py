"""The command line with a small model: its flags and text, refusals, and files that are damaged."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from memspan.lab import cli

TEXT = ("the quick brown fox jumps over the lazy dog; " * 400).encode()
FLAGS = """
--model.n-layers 1 --model.d-model 16 --model.n-heads 2 --model.d-ff 32 --model.memory-length 8
--train.batch-size 2 --train.segment-length 8 --train.steps 6 --train.evaluate-every 3
--train.evaluate-tokens 64 --train.save-every 2 --train.sample-tokens 10 --train.device cpu
--optim.warmup-steps 2
"""
SMALL = FLAGS.split()


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run, expect status 2 and one line; return the line."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        cli.main([str(a) for a in arguments])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    (line,) = said.splitlines()
    assert line.startswith("memspan: ")
    return line


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run, and return what is said on standard output."""
    capsys.readouterr()
    cli.main([str(a) for a in arguments])
    return capsys.readouterr().out


def pipe(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    """Give the text on standard input."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))


def harm(path: Path, damage: str) -> None:
    content = bytearray(path.read_bytes())
    path.unlink()
    if damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        content[len(content) * 3 // 4] ^= 1
        path.write_bytes(content)
