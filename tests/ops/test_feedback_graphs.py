"""The loop of the Feedback Transformer as CUDA graphs, by a stand-in that replays on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from captures import graphs_on_cpu
from feedback_models import OPTIONS, everything, gradients, memory_of, model_of, vectors
from golden import assert_same
from memspan.errors import MemspanError
from memspan.ops.feedback import graphs


@pytest.fixture
def on_a_device() -> Iterator[None]:
    graphs._graphs.clear()
    with graphs_on_cpu():
        yield
    graphs._graphs.clear()


@pytest.mark.usefixtures("on_a_device")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_graphs_equal_the_reference(options: dict[str, Any]) -> None:
    """Over segments of one size, whose masks, memories and weights' gradients differ: replays."""
    model = model_of(**{"memory_length": 5} | options)
    memory = memory_of(model, "rows", 3)
    given = (model, vectors(3, 18), memory, [6, 6, 6])
    found = everything(*given, "graph")
    # One for each direction.
    assert len(graphs._graphs) == 2
    for name, expected in everything(*given, "reference").items():
        assert_same(found[name], expected, 1e-9, name)


@pytest.mark.usefixtures("on_a_device")
def test_passes_before_a_backward_do_not_disturb_one_another() -> None:
    model = model_of(memory_length=4)
    parts = vectors(2, 12).split(6, 1)
    losses = [model(x, implementation="graph").hidden.square().sum() for x in parts]
    for x, loss in zip(parts, losses, strict=True):
        expected = model(x, implementation="reference").hidden.square().sum()
        for a, b in zip(gradients(model, loss), gradients(model, expected), strict=True):
            assert_same(a, b, 1e-9, "gradient")


@pytest.mark.usefixtures("on_a_device")
def test_few_graphs_are_kept() -> None:
    model = model_of(memory_length=4)
    with torch.no_grad():
        for length in range(1, graphs.MOST + 4):
            model(vectors(1, length), implementation="graph")
    assert len(graphs._graphs) == graphs.MOST


def test_cpu_is_refused() -> None:
    with pytest.raises(MemspanError, match="the graph implementation needs CUDA: use fused"):
        model_of()(vectors(1, 2), implementation="graph")
