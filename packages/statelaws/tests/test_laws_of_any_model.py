"""Planted bugs are caught by the laws that name them, correct models give no alarm; laws as tests."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import small_models
from small_models import BUGS, Attention, Convolved, Gated, Sliding, State, Twin
from statelaws import check
from statelaws.laws import NAMES
from statelaws.protocol import Claims

WITHOUT_A_SCRIPT = {small_models.TheModelKeepsItsOutputs, small_models.CountsInSixteenBits}


@pytest.mark.parametrize(("law", "kind"), [pytest.param(*bug, id=bug[1].__name__) for bug in BUGS])
def test_a_planted_bug_is_caught_by_the_law_that_names_it(
    law: str, kind: type[Twin], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = check(kind(), laws=[law])[law]
    assert finding.outcome == "broken", finding
    # Enough to see it at a glance.
    case = re.search(r"\d rows? of ([^:]*) tokens?", finding.detail)
    assert law in ("bounded", "long-run") or (case and len(case[1]) < 14), finding.detail
    if kind in WITHOUT_A_SCRIPT:
        assert finding.script is None
        return
    assert finding.script is not None
    assert len(finding.script.splitlines()) < 25
    model = kind()
    printed = io.StringIO()
    model.module.eval()
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(printed), torch.enable_grad():
        exec(finding.script, {"model": model})
    if law == "bounded":
        sizes = json.loads(printed.getvalue())
        assert sizes[-1] > 10 * sizes[0]
    elif ".shape" in finding.script.splitlines()[-1]:
        assert "torch.Size([1, 2, 11]) torch.Size([1, 1, 11])" in printed.getvalue()
    else:
        rounding = float(finding.script.rpartition("explains ")[2])
        times = 2 if kind().dtype == torch.bfloat16 else 10
        assert float(printed.getvalue()) > times * rounding


def test_every_law_has_a_bug_that_breaks_it() -> None:
    assert {law for law, _ in BUGS} == set(NAMES)


class ByDesign(Attention):
    """Each segment sees all of itself as one, so outputs depend on the cuts, as is said."""

    claims = Claims(cuts=False, bounded=False, carries_gradients=False)
    read_padded: Any = None
    read_packed: Any = None

    def positions(self, state: State, real: Tensor) -> Tensor:
        return super().positions(state, real) + real.shape[1]


@pytest.mark.parametrize("exact", [False, True], ids=["float32 tokens", "float64 vectors"])
@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        (Gated, {"roll-back"}),
        (Convolved, {"roll-back", "replay"}),
        (Attention, {"replay"}),
        (Sliding, {"padding-right", "padding-left", "roll-back", "replay"}),
        (
            ByDesign,
            {"padding-right", "padding-left", "cuts", "gradients", "replay", "long-run"},
        ),
    ],
)
def test_a_correct_model_breaks_no_law(kind: type[Twin], missing: set[str], exact: bool) -> None:
    report = check(kind(torch.float64, vectors=True) if exact else kind(), seed=int(exact))
    outcomes = {f.law: f.outcome for f in report.findings if f.outcome != "holds"}
    assert outcomes.keys() == missing, str(report)
    assert set(outcomes.values()) <= {"not-offered", "refused"}, str(report)
    if exact:
        assert all(f.floor is None or f.floor < 1e-12 for f in report.findings)


# ----- As cases of pytest


README = Path(__file__).parents[1] / "README.md"

CASES = """
import torch
from statelaws.testing import laws
from small_models import Gated, SelectIgnoresTheOrder

test_right = laws(Gated, only=["cuts", "files", "roll-back"], seeds=(0, 1))
test_wrong = laws(SelectIgnoresTheOrder, only=["rows", "cuts"])
test_known = laws(SelectIgnoresTheOrder, only=["rows"], xfail={"rows": "sorted rows"})
test_mended = laws(Gated, only=["rows"], xfail={"rows": "no longer so"})
"""


@pytest.mark.usefixtures("own_folder")
def test_a_failure_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    Path("test_mine.py").write_text(CASES)
    pytest.main(["-p", "no:cacheprovider", "-q", "-rsx", "test_mine.py"])
    said = capsys.readouterr().out
    for words in (
        "2 failed, 5 passed, 2 skipped, 1 xfailed",
        "test_wrong[rows-0]",
        "[XPASS(strict)] no longer so",
        "law broken: a row's outputs do not depend on other rows",
        "select the rows in reverse: 2 rows of 2 x 1 tokens",
        "s4 = select(s3, torch.tensor([1, 0]))",
        "from small_models import SelectIgnoresTheOrder",
        "not-offered: it cannot be rolled back",
    ):
        assert words in said
    # The failure alone, not how it came about.
    assert "finding.script" not in said


def test_the_readme_runs_and_is_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 75
    scope: dict[str, object] = {}
    for code in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        exec(code, scope)
    assert "cuts           holds" in capsys.readouterr().out
    assert scope["test_laws"]
