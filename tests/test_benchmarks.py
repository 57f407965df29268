"""`make bench`, its rows and what is counted; and trainings that are compared: each is made once."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import findings
import throughput
import timing
import trainings
import works
from peers import registry
from sides import n_parameters
from works import LARGE_OPERATIONS, LARGE_PRODUCT, PRECISIONS, autocast, operations

RESULTS = Path(throughput.__file__).parent / "results"
LABEL = {"architecture": "transformer-xl", "work": "train", "size": "S", "precision": "float32"}


def test_the_machine_is_told() -> None:
    machine = timing.machine()
    assert machine["capability"] == torch.backends.cpu.get_cpu_capability()
    assert {"cpu", "cores", "multiplies_bfloat16", "torch", "command"} <= machine.keys()
    assert json.loads(json.dumps(machine)) == machine


def test_autocast_surrounds_reading_and_the_forward_passes_of_training() -> None:
    """Around training's backward passes it would change them."""
    for work, reads in (("train", False), ("evaluate", True)):
        with works.at("bfloat16", work):
            assert torch.is_autocast_enabled("cpu") == reads
    assert not torch.is_autocast_enabled("cpu")


def test_operations_of_products() -> None:
    x = torch.randn(5, 3)
    linear = torch.nn.Linear(3, 7)
    # Forward, and the weight's gradient: x needs none.
    assert operations(lambda: linear(x).sum().backward()) == 2 * 2 * 5 * 3 * 7
    a = torch.randn(2, 4, 3)
    b = torch.randn(2, 3, 6)
    c = torch.randn(2, 4, 6)
    expected = 2 * 2 * 4 * 3 * 6
    assert operations(lambda: torch.bmm(a, b, out=c)) == expected
    assert operations(lambda: c.baddbmm_(a, b)) == expected
    q = torch.randn(2, 1, 4, 8)
    attend = partial(torch.nn.functional.scaled_dot_product_attention, q, q, q)
    assert operations(attend) == 2 * (2 * 2 * 4 * 4 * 8)
    with autocast("bfloat16"):
        assert operations(lambda: linear(x)) == 2 * 5 * 3 * 7


def test_rows_of_all_peers() -> None:
    """Rows of made-up times: labml computes our function, plain-gpt another."""
    times = {"memspan": [4.0, 12.0, 4.0], "labml": [8.0, 24.0, 16.0], "plain-gpt": [4.0, 12.0, 2.0]}
    times[LARGE_PRODUCT] = [0.004, 0.012, 0.004]
    same = {"labml": True, "plain-gpt": False}
    peaks = {"memspan": 10.0, "labml": 20.0}
    rows = throughput.compared(LABEL, times, 100, same, peaks, 250 * LARGE_OPERATIONS)
    assert [row["peer"] for row in rows] == list(same)
    assert rows[0] == LABEL | {
        "rounds": 3,
        "tokens_per_second": 25.0,
        "peak_megabytes": 10.0,
        # In each round a quarter of the step's time would do for the products.
        "products_share": 0.25,
        "product_gflops": round(LARGE_OPERATIONS / 0.004 / 1e9, 1),
        "peer": "labml",
        "ratio": 2.0,
        "low": 2.0,
        "high": 4.0,
        "peer_tokens_per_second": 6.2,
        "same_function": True,
        "peer_peak_megabytes": 20.0,
    }
    assert "2.00-4.00" in throughput.table(rows)
    (alone,) = throughput.compared(LABEL, times, 100, {}, {}, 0)
    assert not {"peer", "products_share"} & set(alone)
    assert "25" in throughput.table([alone])


def test_a_measurement_from_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"d_model": 8, "n_heads": 2, "n_layers": 1, "d_ff": 8, "batch_size": 1}
    small = replace(registry.S, **sizes, segment_length=4, memory_length=4)
    monkeypatch.setitem(registry.SIZES["transformer-xl"], "S", small)
    monkeypatch.setattr(throughput, "interleaved", partial(timing.interleaved, seconds=1e-4))
    monkeypatch.setattr(throughput, "peak_of", lambda *_: 2**20)
    # Of all that the test process holds: seconds in every round.
    monkeypatch.setattr(timing.gc, "collect", lambda: 0)
    asked = ["train", "evaluate", "generate"]
    rows = throughput.measure("transformer-xl", "S", asked, ["plain-gpt"], PRECISIONS, 1)
    # The plain GPT generates nothing here.
    expected = [(work, precision) for work in asked[:2] for precision in PRECISIONS]
    assert [(row["work"], row["precision"]) for row in rows] == expected
    assert all(row["ratio"] > 0 for row in rows)
    assert all(("products_share" in row) == (row["work"] == "train") for row in rows)
    assert json.loads(json.dumps(rows)) == rows


@pytest.mark.parametrize("name", ["latest.json", "no-compiler.json"])
def test_committed_rows_can_be_shown(name: str) -> None:
    rows = json.loads((RESULTS / name).read_text())["rows"]
    assert all(row["precision"] in PRECISIONS for row in rows)
    assert len(throughput.table(rows).splitlines()) > len(rows)


def test_every_variant_is_a_model() -> None:
    for row, group in findings.ROWS.items():
        for variant in group.variants:
            assert n_parameters(findings.config_of(row, variant, 1, 10)) > 100_000


def test_trainings_are_made_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, " * 300)
    jobs = findings.jobs_of(["positions"], [2], steps=1)
    (job,) = [job for job in jobs if job["variant"] == "distances"]
    assert trainings.missing([job], path) == [job]
    found = findings.run(job, text)
    trainings.keep(job | found, path)
    assert trainings.missing([job], path) == []
    # Another seed or length is another training.
    others = [job | {"seed": 1}, job | {"steps": 2}]
    assert trainings.missing(others, path) == others
    # Trained without memory; longer ones are read, too.
    assert found["by_memory_length"]["0"] == found["nats"] != found["by_memory_length"]["128"]
