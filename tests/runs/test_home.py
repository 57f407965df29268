"""Paths that begin with ``~``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import memspan
from memspan.lab.cli import main
from memspan.lab.data.options import DataConfig
from tiny_runs import OPTIONS, TEXT


def test_a_tilde_is_the_home_directory_wherever_a_path_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    here = tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USERPROFILE", str(home))
    monkeypatch.chdir(here)
    (home / "text.txt").write_text(TEXT)
    config = replace(OPTIONS, data=DataConfig(corpus="~/text.txt"))
    assert memspan.train(config, "~/run") == home / "run"
    run = memspan.load("~/run")
    assert memspan.save_run(run.model, "~/saved") == home / "saved"
    with pytest.raises(memspan.MemspanError, match="run is finished"):
        memspan.resume("~/run")

    memory = memspan.generate("~/run", TEXT, tokens=0).memory
    memory.save("~/read.memory", run.model.fingerprint())
    assert (home / "read.memory").is_file()
    assert run.model.load_memory("~/read.memory").batch_size == 1
    memspan.evaluate("~/run", per_token="~/tokens.jsonl", memory="~/read.memory")
    assert (home / "tokens.jsonl").is_file()

    options = ["--prompt-file=~/text.txt", "--tokens=0", "--save-memory=~/shell.memory"]
    main(["generate", "~/run", *options])
    assert (home / "shell.memory").is_file()
    main(["train", "--preset=~/run/config.toml", "--train.steps=1", "--out=~/again"])
    assert (home / "again" / "config.toml").is_file()
    assert not [*here.iterdir()]
