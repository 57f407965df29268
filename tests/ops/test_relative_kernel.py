"""Triton programs of relative attention: interpreted on the CPU, compiled for GPUs, refused here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memspan.errors import MemspanError
from memspan.ops import triton_programs
from memspan.ops.relative import IMPLEMENTATIONS, Positions, relative_attention
from on_gpu.jobs import predicted
from triton_scripts import needs_triton, proven


@needs_triton
@pytest.mark.processes
def test_random_shapes_agree_with_float64_in_the_interpreter() -> None:
    """Guards of the storage included: see the script."""
    (row,) = proven("relative_kernel", "shapes", "--shapes", "24", interpret=True)
    assert sum(row["shapes"].values()) == 24
    assert set(row["worst"]) == {"float32", "bfloat16"}


@needs_triton
@pytest.mark.processes
@pytest.mark.parametrize("target", ["80", "90", "100", "gfx942"])
def test_programs_compile_without_spills(target: str) -> None:
    rows = proven("relative_kernel", "targets", "--only", target, "--widths", "64", interpret=False)
    assert len(rows) == 6
    for row in rows:
        assert row["spilled"] == 0, row


def given(dtype: torch.dtype = torch.float32, width: int = 4) -> dict[str, Any]:
    """Arguments of the operation for two queries, the first of which has one key of memory."""
    q = torch.ones(1, 1, 2, width, dtype=dtype)
    k = torch.ones(1, 1, 3, width, dtype=dtype)
    mask = torch.ones(1, 2, 3, dtype=torch.bool).tril(1)
    return {"q": q, "k": k, "v": k, "positions": Positions(k[0]), "mask": mask}


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"dropout": 0.1}, "the triton implementation has no dropout: use fused"),
        ({"received": torch.zeros(1, 3)}, "has no attention weights to sum"),
    ],
)
def test_options_beyond_the_programs_are_refused(option: dict[str, Any], message: str) -> None:
    with pytest.raises(MemspanError, match=message):
        relative_attention(**given(), **option, implementation="triton")


@pytest.mark.parametrize(
    ("release", "message"),
    [
        (None, "needs Triton: pip install triton, or use fused"),
        (
            "3.5.1",
            r"needs Triton 3.6 or newer, not 3.5.1: pip install --upgrade triton, or use fused",
        ),
    ],
    ids=["none", "old"],
)
def test_triton_that_cannot_serve_is_refused(
    release: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_programs, "find_spec", lambda name: release)
    monkeypatch.setattr(triton_programs, "version", lambda name: release)
    monkeypatch.setattr(triton_programs, "MISSING", triton_programs.missing())
    with pytest.raises(MemspanError, match=message):
        relative_attention(**given(), implementation="triton")


@needs_triton
def test_cpu_is_refused() -> None:
    with pytest.raises(MemspanError, match="the triton implementation needs CUDA: use fused, or"):
        relative_attention(**given(), implementation="triton")


@needs_triton
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (given(torch.float16), "takes float32 and bfloat16, not float16: convert, or use fused"),
        (given(width=129), "takes heads up to 128 wide, not 129: use fused"),
        (
            given() | {"mask": torch.tensor([[[True, False, False], [True, False, True]]])},
            "takes masks that are one run of keys per query: use fused",
        ),
    ],
    ids=["half", "wide", "gap"],
)
def test_inputs_beyond_the_programs_are_refused(
    changed: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.setattr(triton_programs, "interpreted", lambda program: True)
    with pytest.raises(MemspanError, match=message):
        relative_attention(**changed, implementation="triton")


def test_programs_are_chosen_by_name_alone() -> None:
    """Also where they could run: nobody has measured them."""
    assert not IMPLEMENTATIONS["triton"].suits(None)  # type: ignore[arg-type]


@needs_triton
@pytest.mark.processes
def test_the_programs_are_an_operator_of_graphs_and_models() -> None:
    """opcheck, one graph with the same numbers, and a model that reads documents: see the script."""
    (row,) = proven("relative_kernel", "operator", interpret=True)
    assert row["checked"] == ["opcheck", "graph", "model"]


@needs_triton
@pytest.mark.parametrize("size", ["middle", "large"])
def test_the_programs_need_a_third_of_the_memory_of_step_1(size: str) -> None:
    """Counted without a GPU: nothing is computed."""
    from on_gpu import attention

    by_name = {job.what: job for job in attention.jobs_of(size, False)}
    ours, theirs = (
        predicted(by_name[f"{side}, bfloat16, training"])["mib"] for side in ("triton", "step 1")
    )
    assert ours < theirs / 3
