"""`make bench`: the rows of both views, and what is counted."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from rich.console import Console

import throughput
import timing
from peers import registry
from precisions import PRECISIONS, autocast
from products import LARGE_OPERATIONS, LARGE_PRODUCT, operations


def test_operations_of_products() -> None:
    x, linear = torch.randn(5, 3), torch.nn.Linear(3, 7)
    # Forward, and the weight's gradient: x needs none.
    assert operations(lambda: linear(x).sum().backward()) == 2 * 2 * 5 * 3 * 7
    q = torch.randn(2, 1, 4, 8)
    attend = partial(torch.nn.functional.scaled_dot_product_attention, q, q, q)
    assert operations(attend) == 2 * (2 * 2 * 4 * 4 * 8)
    with autocast("bfloat16"):
        assert operations(lambda: linear(x)) == 2 * 5 * 3 * 7


def test_rows_of_both_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of made-up times in all precisions: labml computes our function, plain-gpt another."""
    monkeypatch.setattr(
        throughput, "own_precision", lambda name, _: "bfloat16" if name == "memspan" else "float32"
    )
    seconds = {"float32": 4.0, "medium": 2.0, "bfloat16": 1.0}
    times = {("memspan", p): [s, 3 * s, s] for p, s in seconds.items()}
    times |= {("labml", p): [2 * s, 6 * s, 4 * s] for p, s in seconds.items()}
    times |= {("plain-gpt", p): [s, 3 * s, s / 2] for p, s in seconds.items()}
    times |= {(LARGE_PRODUCT, p): [s / 1000, 3 * s / 1000, s / 1000] for p, s in seconds.items()}
    rows = throughput.compared(
        {"architecture": "transformer-xl", "work": "train", "size": "S"},
        times=times,
        precisions=PRECISIONS,
        tokens=100,
        same_function={"labml": True, "plain-gpt": False},
        peaks={("memspan", p): 10.04 for p in seconds} | {("labml", "float32"): 20.0},
        multiplied=250 * LARGE_OPERATIONS,
    )
    order = [(row["setting"], row["precision"], row["peer"]) for row in rows]
    assert order == [
        *(("same", p, peer) for p in PRECISIONS for peer in ("labml", "plain-gpt")),
        *(("as-it-comes", "bfloat16", peer) for peer in ("labml", "plain-gpt")),
    ]
    # In each round a quarter of the step's time would do for the products.
    first = {"tokens_per_second": 25.0, "peer_tokens_per_second": 6.2, "products_share": 0.25}
    first |= {"ratio": 2.0, "low": 2.0, "high": 4.0, "peak_megabytes": 10.0, "same_function": True}
    assert rows[0].items() >= first.items()
    assert (rows[6]["ratio"], rows[6]["low"], rows[6]["high"]) == (8.0, 8.0, 16.0)


def test_a_measurement_from_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(
        registry.S, d_model=8, n_heads=2, n_layers=1, d_ff=8, segment_length=4, memory_length=4
    )
    monkeypatch.setitem(registry.SIZES["transformer-xl"], "S", replace(small, batch_size=1))
    monkeypatch.setattr(throughput, "interleaved", partial(timing.interleaved, seconds=1e-4))
    monkeypatch.setattr(throughput, "peak_megabytes", lambda *_: 1.0)
    # Of all that the test process holds: seconds in every round.
    monkeypatch.setattr(timing.gc, "collect", lambda: 0)
    rows = throughput.measure(
        "transformer-xl",
        "S",
        ["train", "evaluate", "generate"],
        ["plain-gpt"],
        ["float32", "bfloat16"],
        1,
        Console(quiet=True),
    )
    # The plain GPT generates nothing here.
    assert [(row["work"], row["precision"]) for row in rows] == [
        (work, p) for work in ("train", "evaluate") for p in ("float32", "bfloat16")
    ]
    assert all(row["ratio"] > 0 and row["setting"] == "same" for row in rows)
    assert all(("products_share" in row) == (row["work"] == "train") for row in rows)
    assert json.loads(json.dumps(rows)) == rows
