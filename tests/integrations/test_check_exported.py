"""``memspan check`` on a run that was exported to transformers' format."""

from __future__ import annotations

from pathlib import Path

import pytest

import memspan
from memspan.lab import cli
from memspan.lab.integrations.transformers import export

pytestmark = pytest.mark.usefixtures("own_folders")


def test_an_exported_run_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    export(memspan.load("shakespeare-feedback"), Path("folder"))
    capsys.readouterr()
    cli.main(["check", "folder", "--laws", "repeatable"])
    assert "repeatable     holds" in capsys.readouterr().out
