"""docs/which-one.md shows what was measured."""

from __future__ import annotations

import which_one


def test_the_table_is_what_the_results_say() -> None:
    assert which_one.PAGE.read_text(encoding="utf-8") == which_one.page(), (
        "run python benchmarks/which_one.py --page"
    )
