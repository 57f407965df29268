"""Tests of models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def gradients_where_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    """None are recorded in modules that say so, which saves a third of the time, but for some tests."""
    mark = request.node.get_closest_marker("gradients")
    with torch.set_grad_enabled(mark is None or mark.kwargs.get("recorded", True)):
        yield
