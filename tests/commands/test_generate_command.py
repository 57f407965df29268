"""``memspan generate``: seeds, prompts, samples, and memories that are saved and read on from."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import memspan
from command_line import SMALL, TEXT, harm, refused
from memspan import cli
from memspan.errors import MemspanError

pytestmark = pytest.mark.usefixtures("text_file")


def test_generate_is_seeded_and_continues_from_a_memory(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def text(*options: str) -> str:
        capsys.readouterr()
        cli.main(["generate", "run", "--tokens", "20", "--seed", "3", *options])
        return capsys.readouterr().out

    whole = text("--prompt", "the quick brown fox")
    assert whole == text("--prompt", "the quick brown fox")
    Path("book.txt").write_text("the quick bro")
    cli.main(
        ["generate", "run", "--prompt-file", "book.txt", "--tokens", "0", "--save-memory", "m"]
    )
    later = text("--memory", "m", "--prompt", "wn fox")
    assert later == whole.removeprefix("the quick bro")
    greedy = text("--greedy", "--prompt", "the")
    assert greedy == text("--top-k", "1", "--prompt", "the")
    samples = text("--greedy", "--prompt", "the", "--samples", "2")
    with pytest.raises(
        MemspanError, match=r"10,000,000,000 samples would take at least .* lower --samples"
    ):
        memspan.generate("run", samples=10**10)
    assert samples == "".join(f"--- sample {n} ---\n{greedy}" for n in (1, 2))


def test_a_memory_of_another_model_or_damaged_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["generate", "run", "--tokens", "3", "--save-memory", "m"])
    cli.main(["train", "--data.corpus", "text.txt", "--out", "b", *SMALL, "--train.seed", "9"])
    assert "another model" in refused(capsys, "generate", "b", "--memory", "m")
    harm(Path("m"), "flipped")
    assert "damaged" in refused(capsys, "generate", "run", "--memory", "m")
    assert "missing" in refused(capsys, "generate", "run", "--memory", "n")


def test_a_saved_memory_overwrites_no_other_file(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save = ["generate", "run", "--tokens", "2", "--save-memory"]
    for path in (run / "model.safetensors", Path("text.txt"), run):
        before = path.stat().st_mtime_ns
        assert "is not a memory file" in refused(capsys, *save, path, "--force")
        assert path.stat().st_mtime_ns == before
    Path("m").touch()
    cli.main([*save, "m"])
    assert "already holds a memory" in refused(capsys, *save, "m")
    cli.main([*save, "m", "--force"])


def test_a_prompt_may_come_from_standard_input(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("p").write_bytes(TEXT[:700])
    said = []
    for name in ("p", "-"):
        capsys.readouterr()
        with open("p") as file:
            monkeypatch.setattr(sys, "stdin", file)
            cli.main(["generate", "run", "--prompt-file", name, "--tokens", "9", "--seed", "1"])
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


def test_what_is_written_is_printed_as_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write = ["generate", "run", "--prompt", "ab", "--tokens", "9", "--seed", "1", "--samples", "2"]
    capsys.readouterr()
    cli.main([*write, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["run"], found["prompt"]) == ("run", "ab")
    cli.main(write)
    plain = capsys.readouterr().out
    for sample in found["samples"]:
        assert f"ab{sample['text']}\n" in plain
        assert bytes(sample["tokens"]).decode(errors="replace").startswith(sample["text"])
        assert len(sample["tokens"]) == 9
