"""docs/any-span.md shows what was measured."""

from __future__ import annotations

import any_span


def test_the_table_is_what_the_results_say() -> None:
    assert any_span.PAGE.read_text(encoding="utf-8") == any_span.page(), (
        "run python benchmarks/any_span.py --page"
    )
