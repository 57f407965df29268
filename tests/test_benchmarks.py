"""`make bench`: the two views, what is counted, and that a measurement leaves no setting behind."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console

import throughput
import timing
import works
from memspan.precision import Precision
from peers import registry
from precisions import (
    PRECISIONS,
    Comparison,
    Processor,
    autocast,
    comparisons,
    processor,
    products_in,
)
from products import LARGE_OPERATIONS, LARGE_PRODUCT, operations

RESULTS = Path(throughput.__file__).parent / "results"
LABEL = {"architecture": "transformer-xl", "work": "train", "size": "S"}


def test_precisions_that_a_processor_has_use_for() -> None:
    assert Processor("AVX2", False, ("avx2", "fma")).precisions == ("float32",)
    assert Processor("AVX512", True, ("avx2", "avx512f", "fma")).precisions == PRECISIONS
    machine = timing.machine()
    assert machine["capability"] == torch.backends.cpu.get_cpu_capability()
    assert machine["flags"] == processor().flags


def test_settings_that_coincide_are_one_row() -> None:
    same = [Comparison("same", p, p, p == "float32") for p in PRECISIONS]
    assert comparisons(PRECISIONS, "float32", "float32") == same
    own = Comparison("as-it-comes", "bfloat16", "float32", True)
    assert comparisons(["float32"], "bfloat16", "float32") == [
        replace(same[0], as_it_comes=False),
        own,
    ]
    # The defaults of both were not among those asked for.
    assert comparisons(["medium"], "float32", "float32") == [
        Comparison("same", "medium", "medium", False),
        Comparison("as-it-comes", "float32", "float32", True),
    ]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("work", ["train", "evaluate"])
def test_settings_are_restored(precision: str, work: str) -> None:
    before = torch.get_float32_matmul_precision()
    with contextlib.suppress(KeyError), works.at(precision, work):
        wanted = "medium" if precision == "medium" else "highest"
        assert torch.get_float32_matmul_precision() == wanted
        # Training has its autocast in every step: outside, its backward pass would run under it.
        reads = precision == "bfloat16" and work == "evaluate"
        assert torch.is_autocast_enabled("cpu") == reads
        raise KeyError
    assert torch.get_float32_matmul_precision() == before
    assert not torch.is_autocast_enabled("cpu")


def test_products_in_is_entered_for_each_turn() -> None:
    seen: dict[str, set[str]] = {"float32": set(), "medium": set()}
    timing.interleaved(
        {p: lambda p=p: seen[p].add(torch.get_float32_matmul_precision()) for p in seen},
        rounds=2,
        seconds=1e-5,
        within=products_in,
    )
    assert seen == {"float32": {"highest"}, "medium": {"medium"}}


def test_operations_of_products() -> None:
    x, linear = torch.randn(5, 3), torch.nn.Linear(3, 7)
    # Forward, and the weight's gradient: x needs none.
    assert operations(lambda: linear(x).sum().backward()) == 2 * 2 * 5 * 3 * 7
    a, b, c = torch.randn(2, 4, 3), torch.randn(2, 3, 6), torch.randn(2, 4, 6)
    expected = 2 * 2 * 4 * 3 * 6
    assert operations(lambda: torch.bmm(a, b, out=c)) == expected
    assert operations(lambda: c.baddbmm_(a, b)) == expected
    q = torch.randn(2, 1, 4, 8)
    attend = partial(torch.nn.functional.scaled_dot_product_attention, q, q, q)
    assert operations(attend) == 2 * (2 * 2 * 4 * 4 * 8)
    with autocast("bfloat16"):
        assert operations(lambda: linear(x)) == 2 * 5 * 3 * 7


@pytest.mark.parametrize(
    ("auto", "in_training", "in_reading"),
    [
        (Precision(), "float32", "float32"),
        (Precision(matmul="medium"), "medium", "medium"),
        (Precision("bfloat16"), "bfloat16", "float32"),
    ],
)
def test_as_it_comes_is_what_auto_is(
    monkeypatch: pytest.MonkeyPatch, auto: Precision, in_training: str, in_reading: str
) -> None:
    monkeypatch.setattr(works, "AUTOMATIC", auto)
    assert works.own_precision("memspan", "train") == in_training
    assert works.own_precision("memspan", "generate") == in_reading
    assert works.own_precision("labml", "train") == "float32"


def rows_of(monkeypatch: pytest.MonkeyPatch, own: str, **more: object) -> list[throughput.Row]:
    """Rows of made-up times in all precisions: labml computes our function, plain-gpt another."""
    monkeypatch.setattr(
        throughput, "own_precision", lambda name, work: own if name == "memspan" else "float32"
    )
    seconds = {"float32": 4.0, "medium": 2.0, "bfloat16": 1.0}
    times = {("memspan", p): [s, 3 * s, s] for p, s in seconds.items()}
    times |= {("labml", p): [2 * s, 6 * s, 4 * s] for p, s in seconds.items()}
    times |= {("plain-gpt", p): [s, 3 * s, s / 2] for p, s in seconds.items()}
    times |= {(LARGE_PRODUCT, p): [s / 1000, 3 * s / 1000, s / 1000] for p, s in seconds.items()}
    given = {
        "times": times,
        "precisions": PRECISIONS,
        "tokens": 100,
        "same_function": {"labml": True, "plain-gpt": False},
        "peaks": {("memspan", p): 10.04 for p in seconds} | {("labml", "float32"): 20.0},
        "multiplied": 250 * LARGE_OPERATIONS,
    }
    return throughput.compared(LABEL, **given | more)


def test_rows_of_both_views(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(monkeypatch, own="bfloat16")
    order = [(row["setting"], row["precision"], row["peer"]) for row in rows]
    assert order == [
        *(("same", p, peer) for p in PRECISIONS for peer in ("labml", "plain-gpt")),
        *(("as-it-comes", "bfloat16", peer) for peer in ("labml", "plain-gpt")),
    ]
    assert rows[0] == LABEL | {
        "setting": "same",
        "precision": "float32",
        "peer_precision": "float32",
        "as_it_comes": False,
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
    own = rows[6]
    assert (own["precision"], own["peer_precision"]) == ("bfloat16", "float32")
    assert (own["ratio"], own["low"], own["high"]) == (8.0, 8.0, 16.0)


def printed(rows: list[throughput.Row]) -> str:
    console = Console(width=150)
    with console.capture() as capture:
        for view in throughput.views(rows):
            console.print(view)
    return capture.get()


def test_the_same_setting_is_printed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(rows_of(monkeypatch, own="bfloat16"))
    assert text.index("the same setting for all") < text.index("each library as it comes")
    assert text.count("bfloat16 : float32") == 2
    assert text.count("8.00-16.00") == 1
    assert "measured once" not in text


def test_what_coincides_is_printed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(rows_of(monkeypatch, own="float32"))
    assert text.count("2.00-4.00") == 3
    assert "each library as it comes" not in text
    assert "float32 for all on this processor" in text
    assert "measured once" in text


def test_ours_alone_has_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(monkeypatch, own="bfloat16", same_function={}, peaks={}, multiplied=0)
    assert [(row["precision"], row["as_it_comes"]) for row in rows] == [
        ("float32", False),
        ("medium", False),
        ("bfloat16", True),
    ]
    assert not {"peer", "peer_precision", "products_share"} & set(rows[0])
    assert "25" in printed(rows)


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


@pytest.mark.parametrize("name", ["latest.json", "no-compiler.json"])
def test_committed_rows_say_their_setting(name: str) -> None:
    rows = json.loads((RESULTS / name).read_text())["rows"]
    assert all(row["setting"] in ("same", "as-it-comes") for row in rows)
    assert all(row["precision"] in PRECISIONS for row in rows)
    assert len(printed(rows).splitlines()) > len(rows)
