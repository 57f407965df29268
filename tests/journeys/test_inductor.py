"""Every architecture as one graph of Inductor: a step, a segment and a token after a memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from golden import assert_same
from memspan.models import LanguageModel
from memspan.models.registry import MODELS

# Tracing warns of what is not ours. One worker imports the compiler.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.journeys,
    pytest.mark.xdist_group("compiled"),
]


@pytest.mark.parametrize("part", ["step", "segment", "token"])
@pytest.mark.parametrize("name", MODELS)
def test_inductor_gives_the_numbers_of_one_graph(name: str, part: str) -> None:
    torch.manual_seed(0)
    model = LanguageModel(50, MODELS[name](n_layers=2, d_model=32))
    tokens = torch.randint(50, (2, 24))
    with torch.no_grad():
        memory = model(tokens).memory
    given = tokens[:, :1] if part == "token" else tokens
    parameters = list(model.parameters())

    def run(called: Any) -> list[torch.Tensor]:
        output = called(given, memory, targets=given)
        if part == "step":
            return [output.loss, *torch.autograd.grad(output.loss, parameters, allow_unused=True)]
        return [output.losses, *output.memory.tensors().values()]

    torch._dynamo.reset()
    # nn.LSTM is traced only where this is set.
    with torch._dynamo.config.patch(allow_rnn=True), torch.set_grad_enabled(part == "step"):
        found = run(torch.compile(model, fullgraph=True))
        expected = run(model)
    for n, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if theirs is None:
            assert ours is None
        else:
            assert_same(ours, theirs, 1e-4, f"number {n}")
