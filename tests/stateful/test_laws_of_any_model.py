"""Every planted bug is caught by the law that names it, and correct models give no alarm."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch
from bugs import BUGS
from small_models import TWINS, Twin

from memspan.stateful.check import NAMES, check


@pytest.mark.parametrize(("law", "kind"), [pytest.param(*bug, id=bug[1].__name__) for bug in BUGS])
def test_a_planted_bug_is_caught_by_the_law_that_names_it(
    law: str, kind: type[Twin], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = check(kind(), laws=[law])[law]
    assert finding.outcome == "broken", finding
    # Enough to see it at a glance.
    tokens = finding.detail.rpartition(" of ")[2]
    assert law == "bounded" or len(tokens) < 20, finding.detail
    assert finding.script is not None
    assert len(finding.script.splitlines()) < 25
    model, printed = kind(), io.StringIO()
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
        assert float(printed.getvalue()) > 10 * rounding


def test_every_law_has_a_bug_that_breaks_it() -> None:
    assert {law for law, _ in BUGS} == set(NAMES)


@pytest.mark.parametrize("kind", TWINS)
@pytest.mark.parametrize(
    ("dtype", "vectors", "seed"), [(torch.float32, False, 0), (torch.float64, True, 1)]
)
def test_a_correct_model_breaks_no_law(
    kind: type[Twin], dtype: torch.dtype, vectors: bool, seed: int
) -> None:
    report = check(kind(dtype, vectors), seed=seed)
    expected = {"holds"} | ({"not-offered", "refused"} if kind is not TWINS[2] else set())
    assert {finding.outcome for finding in report.findings} <= expected, str(report)
    if dtype == torch.float64:
        assert all(f.floor is None or f.floor < 1e-12 for f in report.findings)
