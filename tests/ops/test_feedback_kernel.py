"""Triton programs of the Feedback Transformer: interpreted, compiled for GPUs, refused on a CPU."""

from __future__ import annotations

import pytest
import torch

from feedback_models import model_of, vectors
from memspan.errors import MemspanError
from memspan.ops import triton_programs
from memspan.ops.feedback import programs
from memspan.ops.feedback.recurrence import IMPLEMENTATIONS
from triton_scripts import needs_triton, proven


@needs_triton
@pytest.mark.processes
def test_random_models_agree_with_float64_in_the_interpreter() -> None:
    """Guards of the storage included: see the script."""
    (row,) = proven("feedback_kernel", "shapes", "--shapes", "10", interpret=True)
    assert sum(row["shapes"].values()) == 10
    assert set(row["worst"]) == {"float32", "bfloat16"}


@needs_triton
@pytest.mark.processes
@pytest.mark.parametrize("target", ["80", "90", "100", "gfx942"])
def test_programs_compile_without_spills(target: str) -> None:
    rows = proven(
        "feedback_kernel", "targets", "--only", target, "--sizes", "small", interpret=False
    )
    assert len(rows) == 6
    for row in rows:
        assert row["spilled"] == 0, row


def test_programs_are_chosen_by_name_alone() -> None:
    """Also where they could run: nobody has measured them."""
    for name in ("graph", "triton"):
        assert not IMPLEMENTATIONS[name].suits(torch.zeros(1))


def test_triton_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        triton_programs, "MISSING", "needs Triton: pip install triton, or use fused"
    )
    with pytest.raises(MemspanError, match="needs Triton: pip install triton, or use fused"):
        model_of()(vectors(1, 2), implementation="triton")


@needs_triton
def test_cpu_is_refused() -> None:
    with pytest.raises(MemspanError, match="the triton implementation needs CUDA: use fused, or"):
        model_of()(vectors(1, 2), implementation="triton")


@needs_triton
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(1, 1, 6, dtype=torch.float64), "takes float32 and bfloat16, not float64"),
        (torch.zeros(1, 1, 2049), "takes states up to 2048 wide, not 2049: use fused"),
    ],
    ids=["double", "wide"],
)
def test_inputs_beyond_the_programs_are_refused(
    x: torch.Tensor, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_programs, "interpreted", lambda program: True)
    obstacle = programs.obstacle(x)
    assert obstacle is not None
    assert obstacle.startswith(message)
