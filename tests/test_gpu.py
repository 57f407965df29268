"""`make gpu` on the CPU: the path that a GPU takes, and the tests' device."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

import gpu
from peers.side import Size


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_gpu_one_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("there is no cuda here, so nothing was run")


@pytest.mark.processes
def test_gpu_checks_run_on_the_cpu_and_name_failures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Laws and golden tests in processes of their own; a failing test is counted and named."""
    broken = tmp_path / "test_broken.py"
    broken.write_text("def test_one(): assert False\ndef test_two(): pass\n")
    monkeypatch.setitem(gpu.TESTS, "golden", [str(broken), "--rootdir", str(tmp_path)])
    path = tmp_path / "found.json"
    options = ["--device", "cpu", "--parts", "laws", "golden", "--json", str(path)]
    assert gpu.main([*options, "--only", "(test_causality and lstm and not rmt) or broken"]) == 1
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
