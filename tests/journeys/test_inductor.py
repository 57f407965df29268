"""Every architecture as one graph of Inductor and of ``torch.export``: a step, a segment and a token
after a memory."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from golden import assert_same
from memspan.memory import Memory
from memspan.models import LanguageModel
from memspan.models.registry import MODELS
from memspan.models.rmt.config import RMTConfig
from memspan.models.rwkv_7.config import RWKV7Config

# Tracing warns of what is not ours. One worker imports the compiler.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.journeys,
    pytest.mark.xdist_group("compiled"),
]

# A segment fills the block that the memory ends in, and begins another. Blocks and layers add to the
# graph, whose loops are compiled one by one, in seconds each; RWKV-7's second layer differs from its
# first.
TOKENS = 12
SIZES: dict[str, Any] = {"n_layers": 1, "d_model": 32, "block_length": 16}


def config(kind: Any, **options: Any) -> Any:
    """The sizes that the architecture has."""
    own = {field.name for field in fields(kind)}
    return kind(**{name: size for name, size in SIZES.items() if name in own} | options)


CONFIGS = {name: config(kind) for name, kind in MODELS.items()} | {
    "rmt with associative memory": config(RMTConfig, associative=True),
    "rwkv-7": config(RWKV7Config, n_layers=2),
}


def after_a_segment(name: str, rows: int) -> tuple[LanguageModel, torch.Tensor, Memory]:
    """A model, tokens, and a memory of as many."""
    torch.manual_seed(0)
    model = LanguageModel(50, CONFIGS[name])
    tokens = torch.randint(50, (rows, TOKENS))
    with torch.no_grad():
        return model, tokens, model(tokens).memory


@pytest.mark.parametrize("part", ["step", "segment", "token"])
@pytest.mark.parametrize("name", CONFIGS)
def test_inductor_gives_the_numbers_of_one_graph(name: str, part: str) -> None:
    model, tokens, memory = after_a_segment(name, 2)
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


@torch.no_grad()
@pytest.mark.parametrize("length", [TOKENS, 1])
@pytest.mark.parametrize("name", CONFIGS)
def test_an_exported_graph_reads_on_from_its_memory(name: str, length: int) -> None:
    model, tokens, memory = after_a_segment(name, 3)
    rows = {0: torch.export.Dim("rows", min=2)}
    shapes = (rows, [rows for _ in memory.tensors()])
    program = torch.export.export(model, (tokens[:, :length], memory), dynamic_shapes=shapes)
    assert "memspan" not in program.graph_module.code
    read = program.module()
    model, tokens, memory = after_a_segment(name, 5)
    carried = memory
    for _ in range(3):
        expected = model(tokens[:, :length], carried)
        found = read(tokens[:, :length], memory)
        assert_same(found.logits, expected.logits, 1e-4, "logits")
        carried = expected.memory
        memory = found.memory
        for field, theirs in carried.tensors().items():
            assert_same(memory.tensors()[field], theirs, 1e-4, field)
