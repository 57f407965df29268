"""A reader does not read on after its weights have changed: it refuses, and says what to do."""

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
    model = transformer_xl().model()
    other = nn.Linear(2, 2)
    reader = model.reader()
    other(torch.ones(2)).sum().backward()
    torch.optim.AdamW(other.parameters(), fused=True).step()
    # Parameters without a gradient are left as they are.
    torch.optim.AdamW(model.parameters(), fused=True).step()
    reader.read(text(1, 1))
    assert not reader.is_stale


@some_cases
def test_inference_mode(case: Case) -> None:
    """Models that were made in it, and readers that read in it and on outside."""
    usual = case.model()
    with torch.inference_mode():
        made = case.model()
        inside = usual.reader()
        inside.read(text(1, 3))
    outside = made.reader()
    outside.read(text(1, 3))
    for tokens in (text(1, 1), *[text(1, 30)] * 3):
        assert_same(outside.read(tokens), inside.read(tokens), 1e-10, "logits")
    inside.reset([True])
    with torch.inference_mode():
        for parameter in made.backbone.parameters():
            parameter.mul_(1.5)
    # Tensors made in inference mode have no versions, so nothing that depends on them is cached.
    memory = outside.memory
    with torch.no_grad():
        expected = made(text(1, 1), memory).logits
    assert_same(outside.read(text(1, 1)), expected, 1e-10, "logits")


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
    "parameters": lambda model: [
        vars(part).update(_parameters=its._parameters)
        for part, its in zip(model.modules(), other(model).modules(), strict=True)
    ],
    "modules": lambda model: vars(model.backbone).update(_modules=other(model).backbone._modules),
}


@torch.no_grad()
@pytest.mark.parametrize("change", LATER)
@some_cases
def test_a_new_reader_reads_by_the_modules_of_now(case: Case, change: str) -> None:
    """A living one is not asked to notice these, see docs/guides/backbone.md."""
    model = case.model()
    reader = model.reader()
    reader.read(text(1, 4))
    memory = reader.memory
    tokens = text(1, 3, 5)
    LATER[change](model)
    found = model.reader(memory).read(tokens)
    assert_same(found, model(tokens, memory).logits, 1e-10, change)


@torch.no_grad()
@some_cases
def test_a_backbone_or_tensor_that_is_put_in_is_refused(case: Case) -> None:
    for change in (
        lambda model: setattr(model, "backbone", other(model).backbone),
        lambda model: setattr(model.backbone, "layers", model.backbone.layers.float()),
        lambda model: setattr(
            next(part for part in model.backbone.modules() if type(part) in (nn.Linear, nn.LSTM)),
            "weight"
            if any(type(p) is nn.Linear for p in model.backbone.modules())
            else "weight_hh_l0",
            nn.Parameter(torch.zeros(1)),
        ),
    ):
        model = case.model()
        reader = model.reader()
        reader.read(text(1, 4))
        change(model)
        assert reader.is_stale
        with pytest.raises(MemspanError):
            reader.read(text(1, 1))


@torch.no_grad()
def test_writes_through_data_are_the_callers_to_avoid() -> None:
    """The limit: they raise no version. The reader goes on with what it cached, a new one does not."""
    model = transformer_xl().model()
    reader = model.reader()
    reader.read(text(1, 4))
    memory = reader.memory
    tokens = text(1, 3, 5)
    for parameter in model.backbone.parameters():
        parameter.data.mul_(1.5)
    assert not reader.is_stale
    expected = model(tokens, memory).logits
    assert (reader.read(tokens) - expected).abs().max() > 1e-3
    assert_same(model.reader(memory).read(tokens), expected, 1e-10, "logits of a new reader")


@torch.no_grad()
@some_cases
def test_hooks_are_called_by_readers_made_after_them(case: Case) -> None:
    model = case.model()
    calls = []
    handle = model.backbone.layers[-1].register_forward_hook(lambda *_: calls.append(1))
    reader = model.reader()
    reader.read(text(1, 1))
    assert calls
    handle.remove()
    memory = reader.memory
    assert_same(reader.read(text(1, 1)), model(text(1, 1), memory).logits, 1e-10, "logits")


@torch.no_grad()
def test_random_features_and_a_head_of_its_own() -> None:
    favor = SOME["favor"].model()
    untied = SOME["learned"].model()
    for model, change in (
        (favor, lambda: favor.backbone.layers[0].attention.projection.mul_(1.5)),
        (untied, lambda: untied.head.tables[0].mul_(1.5)),
    ):
        reader = model.reader()
        reader.read(text(1, 4))
        change()
        with pytest.raises(StaleReaderError, match=REFUSED):
            reader.read(text(1, 1))
