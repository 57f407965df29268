"""`make gpu` on the CPU: the path that a GPU takes, and the tests' device."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import device
import gpu
from memspan.models import GatedDeltaNetConfig, LanguageModel
from peers.side import Size


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_gpu_one_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("there is no cuda here, so nothing was run")


@pytest.mark.processes
def test_the_same_path_on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Laws and golden tests in processes of their own; a failing test is counted and named."""
    broken = tmp_path / "test_broken.py"
    broken.write_text("def test_one(): assert False\ndef test_two(): pass\n")
    monkeypatch.setitem(gpu.TESTS, "golden", [str(broken), "--rootdir", str(tmp_path)])
    path = tmp_path / "found.json"
    options = ["--device", "cpu", "--parts", "laws", "golden", "--json", str(path)]
    assert gpu.main([*options, "--only", "(test_causality and lstm) or broken"]) == 1
    found = json.loads(path.read_text())
    laws, other = found["tests"]
    assert (laws["passed"], laws["failed"], laws["skipped"]) == (1, 0, 0)
    assert (other["passed"], other["failed"], len(other["failures"])) == (1, 1, 1)
    assert "test_one" in other["failures"][0]
    assert {"device_name", "driver", "torch", "date"} <= found["machine"].keys()


def test_speeds_on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "RULE", (1, 2, 5, 4))
    tiny = Size(8, 2, 1, 8, segment_length=4, memory_length=0, batch_size=1)
    monkeypatch.setitem(gpu.SIZES, "gated-delta-net", {"tiny": tiny})
    monkeypatch.setattr(gpu, "interleaved", partial(gpu.interleaved, seconds=1e-4))
    rows = gpu.speeds(torch.device("cpu"), ["gated-delta-net"], rounds=1)
    trained = [row["precision"] for row in rows if row["work"] == "train"]
    assert trained == ["float32", "bfloat16"]
    assert all(row["ratio"]["middle"] > 0 for row in rows)


def test_what_tests_make_is_moved_and_what_memspan_makes_is_not() -> None:
    """``meta`` stands for a GPU."""
    with device.Moved("meta"):
        made = torch.zeros(2, requires_grad=True)
        assert made.device.type == "meta"
        assert made.requires_grad
        assert torch.ones(2, device="cpu").device.type == "cpu"
        model = LanguageModel(11, GatedDeltaNetConfig(n_layers=1, d_model=8, n_heads=2))
        assert next(model.parameters()).device.type == "cpu"


def test_models_are_moved_when_they_are_made() -> None:
    """In a process of its own, as it holds for all of it."""
    code = """
import sys, torch
sys.path[:0] = sys.argv[1:]
import device
from memspan.models import GatedDeltaNetConfig, LanguageModel
device.run_tests_on("meta")
config = GatedDeltaNetConfig(n_layers=1, d_model=8, n_heads=2)
for made in (config.build(), LanguageModel(11, config)):
    assert {t.device.type for t in made.parameters()} == {"meta"}
"""
    subprocess.run([sys.executable, "-c", code, device.TESTS], check=True)
