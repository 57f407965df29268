"""A reader does not read on after its model has changed: what it returns is what the model gives, or
it refuses and says what to do."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_changed_modules import attribute, put_in, replaced_forward, wrapper
from torch import nn

from architectures import CASES, ONE_OF_EACH, Case, randomise, transformer_xl
from golden import assert_same
from memspan.errors import MemspanError, StaleReaderError
from memspan.models import LanguageModel
from memspan.models.in_place import BufferedReader
from readings import text

pytestmark = pytest.mark.hardening
SOME = {name: CASES[case] for name, case in ONE_OF_EACH.items()} | {
    "learned": CASES["xl-segment-learned"],
    "favor": CASES["fast-delta-favor"],
}
some_cases = pytest.mark.parametrize("case", SOME.values(), ids=SOME)
REFUSED = r"weights or modules have changed .* make a new one with model\.reader\(reader\.memory\)"


def step(optimiser: type[torch.optim.Optimizer], **options: bool) -> Callable[[Any], object]:
    def change(model: LanguageModel) -> None:
        for parameter in model.backbone.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimiser(model.parameters(), lr=0.1, **options).step()

    return change


def other(model: LanguageModel) -> Any:
    """One with the same random features, with which memory was written."""
    return randomise(copy.deepcopy(model).float(), 1).double()


class WithoutGradients(torch.optim.Optimizer):
    """Writes through ``data``, as for steps along random directions."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data.mul_(1.5)


AT_ONCE: dict[str, Callable[[Any], object]] = {
    "AdamW, fused": step(torch.optim.AdamW, fused=True),
    "AdamW, for each": step(torch.optim.AdamW, foreach=True),
    "Adam": step(torch.optim.Adam),
    "SGD, fused": step(torch.optim.SGD, fused=True),
    "not torch's": lambda model: WithoutGradients(model.parameters()).step(),
    "in place": lambda model: nn.init.ones_(next(model.backbone.parameters())),
    "load_state_dict": lambda model: model.load_state_dict(other(model).state_dict()),
    "assigned": lambda model: model.load_state_dict(other(model).state_dict(), assign=True),
    "conversion": lambda model: model.float(),
}


@pytest.mark.parametrize("change", AT_ONCE)
@some_cases
def test_changed_weights_are_refused_at_once(case: Case, change: str) -> None:
    """At the next token, by a reader of the model and by one of the backbone."""
    for length in (1, 3):
        model = case.model()
        reader = model.reader(batch_size=2)
        backbone = model.backbone.reader(None, 2)
        x = torch.randn(2, length, 8, dtype=torch.float64)
        with torch.no_grad():
            for tokens in (text(2, 4), text(2, 1)):
                reader.read(tokens)
            backbone.read(x)
        AT_ONCE[change](model)
        with pytest.raises(MemspanError, match=REFUSED):
            reader.read(text(2, length))
        with pytest.raises(MemspanError, match=REFUSED):
            reader.reset([True, False])
        if hasattr(backbone, "watch"):
            # Whoever converts the model converts the vectors, too.
            x = x.to(next(model.parameters()).dtype)
            with torch.no_grad(), pytest.raises(MemspanError, match=REFUSED):
                backbone.read(x)
        assert reader.is_stale
        model.double()
        model.reader(reader.memory).read(text(2, length))


def test_the_step_of_another_optimiser_changes_nothing() -> None:
    model, other = transformer_xl().model(), nn.Linear(2, 2)
    reader = model.reader()
    other(torch.ones(2)).sum().backward()
    torch.optim.AdamW(other.parameters(), fused=True).step()
    # Parameters without a gradient are left as they are, and so are modules that are marked.
    torch.optim.AdamW(model.parameters(), fused=True).step()
    for part in model.modules():
        part._is_initialised = True
    reader.read(text(1, 1))
    assert not reader.is_stale


@some_cases
def test_inference_mode(case: Case) -> None:
    """Models that were made in it, and readers that read in it and on outside."""
    usual = case.model()
    with torch.inference_mode():
        made, inside = case.model(), usual.reader()
        inside.read(text(1, 3))
    outside = made.reader()
    outside.read(text(1, 3))
    for tokens in (text(1, 1), *[text(1, 30)] * 3):
        assert_same(outside.read(tokens), inside.read(tokens), 1e-10, "logits")
    inside.reset([True])
    with torch.inference_mode():
        for parameter in made.backbone.parameters():
            parameter.mul_(1.5)
    if isinstance(outside._backbone, BufferedReader):
        with pytest.raises(StaleReaderError, match=REFUSED):
            outside.read(text(1, 1))


def equal_or_refused(model: LanguageModel, change: Callable[[Any], object], what: str) -> None:
    reader = model.reader()
    for tokens in (text(1, 4), text(1, 1), text(1, 2)):
        reader.read(tokens)
    memory, tokens = reader.memory, text(1, 3, 5)
    change(model)
    if reader.is_stale:
        with pytest.raises(MemspanError, match=REFUSED):
            reader.read(tokens)
    else:
        assert_same(reader.read(tokens), model(tokens, memory).logits, 1e-10, what)


@torch.no_grad()
@some_cases
def test_values_that_are_written_past_the_version(case: Case) -> None:
    """One number of each parameter in turn, through ``data``: noticed when several tokens are read."""
    model = case.model()
    for name, parameter in model.named_parameters():
        last = parameter.data.view(-1)[-1:]
        equal_or_refused(model, lambda _, last=last: last.add_(0.5), name)
        last -= 0.5


@torch.no_grad()
def test_large_tensors_of_which_a_row_is_written() -> None:
    """Of these only some numbers are looked at: a row of 40 at least once, if not a single number."""
    model = transformer_xl(d_model=40, d_ff=100).model()
    for name, parameter in model.backbone.named_parameters():
        change = parameter.data[..., -1, :] if parameter.dim() > 1 else parameter.data
        reader = model.reader()
        reader.read(text(1, 2))
        change += 0.5
        assert reader.is_stale, name
        change -= 0.5


def everywhere(kind: Callable[..., bool]) -> Callable[[LanguageModel], object]:
    """In the backbone, from the innermost modules on."""
    return lambda model: [
        put_in(model.backbone, name, kind)
        for name in reversed(dict(model.backbone.named_modules()))
    ]


def subclass(model: LanguageModel) -> None:
    for part in model.backbone.modules():
        if type(part) is nn.Linear:
            part.__class__ = Halved


class Halved(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * super().forward(x)


def new_tables_of_hooks(model: LanguageModel) -> None:
    for part in model.backbone.modules():
        part._forward_hooks = OrderedDict()
        if type(part) is nn.Linear:
            part.register_forward_hook(lambda module, given, output: 0.5 * output)


def transposed(model: LanguageModel) -> None:
    """The same numbers at the same address."""
    for parameter in model.backbone.parameters():
        if parameter.dim() == 2 and len(parameter) == parameter.shape[1]:
            parameter.data = parameter.data.mT


LATER: dict[str, Callable[[Any], object]] = {
    **{each.__name__: each for each in (subclass, new_tables_of_hooks, transposed)},
    **{kind.__name__: everywhere(kind) for kind in (attribute, replaced_forward, wrapper)},
    "backbone": lambda model: setattr(model, "backbone", other(model).backbone),
    "parameters": lambda model: [
        vars(part).update(_parameters=its._parameters)
        for part, its in zip(model.modules(), other(model).modules(), strict=True)
    ],
    "modules": lambda model: vars(model.backbone).update(_modules=other(model).backbone._modules),
}


@torch.no_grad()
@pytest.mark.parametrize("change", LATER)
@some_cases
def test_modules_that_are_put_in(case: Case, change: str) -> None:
    equal_or_refused(case.model(), LATER[change], change)


@torch.no_grad()
@some_cases
def test_hooks_that_come_and_go(case: Case) -> None:
    """A new one is noticed at the next token; a reader that was made with one calls it, and reads on
    without it."""
    model, calls = case.model(), []
    layer = model.backbone.layers[-1]
    reader = model.reader()
    reader.read(text(1, 1))
    handle = layer.register_forward_hook(lambda *_: calls.append(1))
    memory = reader.memory
    if isinstance(reader._backbone, BufferedReader):
        with pytest.raises(MemspanError, match=REFUSED):
            reader.read(text(1, 1))
    again = model.reader(memory)
    again.read(text(1, 1))
    assert calls
    handle.remove()
    memory = again.memory
    assert_same(again.read(text(1, 1)), model(text(1, 1), memory).logits, 1e-10, "logits")
    # On the model itself it is noticed, too.
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(StaleReaderError, match=REFUSED):
        again.read(text(1, 1))


@torch.no_grad()
def test_random_features_and_a_head_of_its_own() -> None:
    favor, untied = SOME["favor"].model(), SOME["learned"].model()
    for model, change in (
        (favor, lambda: favor.backbone.layers[0].attention.projection.mul_(1.5)),
        (untied, lambda: untied.head.tables[0].mul_(1.5)),
    ):
        reader = model.reader()
        reader.read(text(1, 4))
        change()
        with pytest.raises(StaleReaderError, match=REFUSED):
            reader.read(text(1, 1))
