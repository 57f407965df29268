"""`make gpu` on the CPU: the path that a GPU takes, its predictions, and the tests' device."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import gpu
from on_gpu import jobs, models
from on_gpu.tests import TESTS


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_gpu_one_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("there is no cuda here, so nothing was run")


@pytest.mark.processes
def test_parts_that_fail_are_lines_of_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each in a process of its own; the others go on, and what was found stays."""
    path = tmp_path / "found.json"
    options = [
        "--device",
        "cpu",
        "--toy",
        "--json",
        str(path),
        "--only",
        "(test_causality and lstm)",
    ]
    assert gpu.main([*options, "--parts", "model-lstm", "rule", "golden"]) == 1
    found = json.loads(path.read_text())
    rows = {(row["part"], row["what"]): row for row in found["rows"]}
    assert rows["model-lstm", "one token"]["ms"] > 0
    assert rows["rule", "gated delta rule, chunked"]["ms"] > 0
    assert "the fla implementation needs CUDA" in rows["rule", "gated delta rule, fla"]["error"]
    # None of them has such a name.
    assert "pytest ended with status 5" in rows["golden", "tests"]["error"]
    assert {"device_name", "driver", "torch", "date"} <= found["machine"].keys()
    said = capsys.readouterr().out
    assert "| rule | gated delta rule, fla |  |  |  |  |  | FAILED: MemspanError: the fla" in said


@pytest.mark.processes
def test_laws_are_counted_and_failures_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "test_broken.py"
    broken.write_text("def test_one(): assert False\ndef test_two(): pass\n")
    monkeypatch.setitem(TESTS, "golden", [str(broken), "--rootdir", str(tmp_path)])
    (row,) = gpu._tests("golden", torch.device("cpu"), None)
    assert (row["passed"], row["failed"], row["skipped"]) == (1, 1, 0)
    assert "test_one" in row["error"]


@pytest.mark.processes
def test_a_part_that_takes_too_long_keeps_its_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "slow.py"
    script.write_text(
        "import sys, time\n"
        "rows = sys.argv[sys.argv.index('--rows') + 1]\n"
        'open(rows, \'a\').write(\'{"what": "first", "ms": 1}\\n\')\n'
        "time.sleep(60)\n"
    )
    monkeypatch.setattr(gpu, "__file__", str(script))
    options = gpu.Namespace(device="cpu", toy=True, only=None)
    first, rest = gpu.run_apart("rule", gpu.parts()["rule"], options, 3)
    assert first == {"part": "rule", "what": "first", "ms": 1}
    assert rest["error"] == "not done after 3 s"


def test_every_job_has_a_prediction_written_down() -> None:
    written = json.loads(gpu.PREDICTIONS.read_text())["predictions"]
    named = {
        f"{name}: {job.what}": job
        for name, part in gpu.parts().items()
        for job in (part.jobs(False) if part.jobs is not None else [])
    }
    assert written.keys() == named.keys()
    assert [name for name, row in written.items() if not row.get("ms", 0) > 0] == []


@pytest.mark.parametrize("architecture", ["transformer-xl", "plain-gpt"])
def test_predictions_grow_with_the_work(architecture: str) -> None:
    size = replace(models.TOY, d_model=64, d_ff=256, segment_length=64)
    found = []
    for batch in (64, 256):
        larger = replace(size, batch_size=batch)
        job = models.training_job(architecture, larger, "float32", None, 1)
        with jobs.as_on_a_gpu():
            with jobs.Counting():
                call = job.prepare(torch.device("cpu"))
                call()
            with jobs.Counting() as counting:
                call()
        found.append(counting)
    small, large = found
    # Attention of many rows is in blocks.
    assert small.operations <= large.operations
    assert 2 < large.peak / small.peak < 4.5
    assert 1 < large.seconds / small.seconds < 4.5


def test_the_memory_counted_is_what_is_alive() -> None:
    n_bytes = 4 * 1000

    def prepare(device: torch.device) -> jobs.Call:
        x = torch.zeros(1000)

        def call() -> None:
            # Two are alive at once, and the third when the first is not.
            y = x + 1
            z = y + 1
            del y
            z.add_(1)
            z = z + 1

        return call

    row = jobs.predicted(jobs.Job("two", prepare))
    assert row["mib"] == jobs.significant(2 * n_bytes / 2**20)
