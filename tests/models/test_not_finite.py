"""Law 7: a NaN in any parameter or input reaches every output that depends on it.

What depends on a number is found in float64, by the reference where there is one: the outputs that
change when the number does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from architectures import CASES, Case, implementations
from memspan.errors import NonFiniteError
from memspan.memory import Memory
from readings import some_memory, text

ROWS = 3
CUTS = (2, 1)
Outputs = dict[str, Tensor]


def floats(memory: Memory) -> Outputs:
    return {f"memory.{n}": t for n, t in memory.tensors().items() if t.is_floating_point()}


@contextmanager
def changed(tensor: Tensor, change: Callable[[float], float]) -> Iterator[None]:
    """With another number in place of the last one that is not zero: a memory's zeros may be slots that
    nobody looks at."""
    flat = tensor.data.view(-1)
    place = flat.nonzero()[-1]
    before = flat[place].clone()
    flat[place] = change(before.item())
    try:
        yield
    finally:
        flat[place] = before


@functools.cache
@torch.no_grad()
def lstm_hides_nan() -> bool:
    """oneDNN's LSTM without code for the processor at hand, as on aarch64: a sigmoid of NaN is 0."""
    lstm = nn.LSTM(1, 1)
    # The output gate's.
    lstm.get_parameter("bias_ih_l0")[3] = math.nan
    return not lstm(torch.ones(1, 1, 1))[0].isnan().any()


class Run:
    """A backbone, a memory and an input, and all that gives their numbers names."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        model = case.model(dtype)
        self.backbone = model.backbone
        self.memory = some_memory(model, ROWS)
        self.x = model.embedding(text(ROWS, sum(CUTS)))
        named = dict(self.backbone.named_parameters()) | floats(self.memory) | {"input": self.x}
        # All layers run the same code, and what the first one says goes through all of them.
        named = {n: t for n, t in named.items() if not n.startswith(("layers.1.", "layers.2."))}
        self.numbers = {n: t for n, t in named.items() if t.any()}

    def model(self, implementation: str) -> Outputs:
        memory = self.memory
        hidden = []
        losses = []
        for part in self.x.split(CUTS, 1):
            out = self.backbone(part, memory, implementation=implementation)
            hidden.append(out.hidden)
            losses.append(out.auxiliary_loss)
            memory = out.memory
        found = {"hidden": torch.cat(hidden, 1), "auxiliary loss": torch.stack(losses)}
        return found | floats(memory)

    def reader(self) -> Outputs:
        """A reader's output. It may refuse values that are not finite."""
        reader = self.backbone.reader(self.memory, ROWS)
        try:
            # Copies: a reader may use what it returned again.
            hidden = [reader.read(part).clone() for part in self.x.split(CUTS, 1)]
        except NonFiniteError:
            return {}
        return {"hidden": torch.cat(hidden, 1)} | floats(reader.memory)

    def ways(self) -> dict[str, Callable[[], Outputs]]:
        """All that can be run: each implementation and the reader."""
        names = implementations(self.backbone)
        return {name: partial(self.model, name) for name in names} | {"reader": self.reader}


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_nan_reaches_all_that_depends_on_it(name: str) -> None:
    if "lstm" in name and lstm_hides_nan():
        pytest.skip("torch's own LSTM hides NaN on this processor")
    exact = Run(CASES[name], torch.float64)
    run = Run(CASES[name], torch.float32)
    ways = run.ways()
    find = exact.ways()["reference"]
    before = find()
    # To save time a part of the parameters; an architecture's cases come to see all of them.
    kind = [n for n in CASES if type(CASES[n].backbone) is type(CASES[name].backbone)]
    carried = [number for number in exact.numbers if number.startswith("memory.")]
    parameters = [number for number in exact.numbers if number not in carried]
    parts = min(4, len(kind))
    for number in [*carried, *parameters[kind.index(name) % parts :: parts]]:
        with changed(exact.numbers[number], lambda value: value + 3):
            depends = {output: found != before[output] for output, found in find().items()}
        with changed(run.numbers[number], lambda value: math.nan):
            for way, outputs in ways.items():
                for output, found in outputs().items():
                    lost = (depends[output] & ~found.isnan()).sum().item()
                    assert not lost, f"{way}: {number} does not reach {lost} numbers of {output}"


@pytest.mark.parametrize("name", ["xl-segment-clamp", "xl-segment-learned", "xl-segment"])
@torch.no_grad()
def test_nan_passes_embedding_and_head(name: str) -> None:
    """Adaptive, not tied, and neither: logits and losses."""
    exact = CASES[name].model()
    model = CASES[name].model(torch.float32)
    tokens = torch.arange(11).view(1, -1)

    def outputs(model: nn.Module) -> tuple[Tensor, Tensor]:
        return model(tokens).logits, model(tokens, targets=tokens.flip(1)).losses

    before = outputs(exact)
    numbers = dict(model.named_parameters())
    for number, tensor in exact.named_parameters():
        if number.startswith("backbone"):
            continue
        with changed(tensor, lambda value: value + 3):
            depends = [found != b for found, b in zip(outputs(exact), before, strict=True)]
        with changed(numbers[number], lambda value: math.nan):
            for found, dependent in zip(outputs(model), depends, strict=True):
                assert found.isnan()[dependent].all(), number
