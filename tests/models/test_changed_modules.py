"""Modules that a user has changed, with an adapter, a hook or a parametrisation, compute what they are
changed to: no implementation and no reader takes their weights alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

from architectures import CASES, Case, compressive, fast_weights, feedback, transformer_xl
from golden import assert_same
from memspan.errors import MemspanError
from memspan.models.language_model import LanguageModel
from readings import assert_memories_equal, text

SOME = {
    "transformer-xl": transformer_xl(),
    "compressive": compressive(),
    "fast-weights": fast_weights(),
    "feedback": feedback(),
}
WITH_PRODUCTS = {name: case for name, case in CASES.items() if name != "lstm"}
every_case = pytest.mark.parametrize("case", WITH_PRODUCTS.values(), ids=WITH_PRODUCTS)


class LowRank(nn.Module):
    """A low-rank adapter that looks like what it wraps, as PEFT's do (Hu et al. 2021, eq. 3)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(0.4 * torch.randn(2, base.in_features, dtype=base.weight.dtype))
        self.up = nn.Parameter(0.4 * torch.randn(base.out_features, 2, dtype=base.weight.dtype))
        self.in_features, self.out_features = base.in_features, base.out_features

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.mT @ self.up.mT


def products(model: LanguageModel) -> Iterator[tuple[str, nn.Linear]]:
    for name, part in list(model.backbone.named_modules()):
        if type(part) is nn.Linear:
            yield name, part


@torch.no_grad()
def adapted(case: Case) -> tuple[LanguageModel, LanguageModel]:
    """With an adapter around every product, and with the adapters merged into the weights."""
    model = copy.deepcopy(case.model())
    merged = copy.deepcopy(model)
    for name, part in products(merged):
        parent, _, last = name.rpartition(".")
        adapter = LowRank(model.backbone.get_submodule(name))
        setattr(model.backbone.get_submodule(parent), last, adapter)
        part.weight += adapter.up @ adapter.down
    return model, merged


@torch.no_grad()
def assert_the_same(model: LanguageModel, expected: LanguageModel) -> None:
    """In segments and for single tokens, by the model and by its reader."""
    memory, reader = None, model.reader(batch_size=3)
    for n, length in enumerate((1, 7, 1, 1, 9)):
        tokens = text(3, length, n)
        out, ours = expected(tokens, memory), model(tokens, memory)
        assert_same(ours.logits, out.logits, 1e-11, "logits")
        assert_same(ours.auxiliary_loss, out.auxiliary_loss, 1e-11, "auxiliary loss")
        assert_memories_equal(ours.memory, out.memory, 1e-11)
        assert_same(reader.read(tokens), out.logits, 1e-11, "logits of the reader")
        memory = out.memory


@every_case
def test_adapters_are_called(case: Case) -> None:
    assert_the_same(*adapted(case))


@every_case
def test_adapters_learn(case: Case) -> None:
    model, _ = adapted(case)
    memory, total = None, torch.zeros((), dtype=torch.float64)
    for n in range(3):
        out = model.train()(text(4, 6, n), memory, targets=text(4, 6, n + 9))
        memory, total = out.memory, total + out.losses.sum() + out.auxiliary_loss
    total.backward()
    for name, parameter in model.named_parameters():
        if name.endswith((".down", ".up")):
            assert parameter.grad.any() or case.sees_itself_only, name


@every_case
def test_hooks_are_called(case: Case) -> None:
    """What they return counts, whether they were there before the reader or not."""
    model, doubled = copy.deepcopy(case.model()), copy.deepcopy(case.model())
    for _, part in products(doubled):
        for parameter in part.parameters():
            parameter.data *= 2
    for _, part in products(model):
        part.register_forward_hook(lambda module, x, output: 2 * output)
    assert_the_same(model, doubled)


class Doubled(nn.Sequential):
    """An adapter in the place of a module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self[0](x)


def _two_wide(layer: Any) -> None:
    layer.feed_forward.inner, layer.feed_forward.outer = nn.Linear(8, 2), nn.Linear(2, 8)


def _patch(part: Any) -> None:
    forward = part.forward
    part.forward = lambda x: 2 * forward(x)


CHANGES: dict[str, Callable[[Any], object]] = {
    "pruned": lambda layer: prune.l1_unstructured(layer.feed_forward.inner, "weight", 0.5),
    "weight norm": lambda layer: nn.utils.weight_norm(layer.feed_forward.inner),
    "no gain": lambda layer: setattr(
        layer, "attention_norm", nn.LayerNorm(8, elementwise_affine=False)
    ),
    "no bias": lambda layer: setattr(layer, "attention_norm", nn.LayerNorm(8, bias=False)),
    "no norm": lambda layer: setattr(layer, "feed_forward_norm", nn.Identity()),
    "epsilon": lambda layer: setattr(layer.attention_norm, "eps", 0.5),
    "no product": lambda layer: setattr(
        getattr(layer, "attention", layer), "output", nn.Identity()
    ),
    "adapter": lambda layer: setattr(layer, "feed_forward", Doubled(layer.feed_forward)),
    "activation": lambda layer: setattr(layer.feed_forward, "activation", F.silu),
    "width": _two_wide,
    "forward": lambda layer: _patch(layer.feed_forward.inner),
    "feed-forward": lambda layer: _patch(layer.feed_forward),
    "dropout": lambda layer: setattr(layer.feed_forward, "dropout", nn.Softplus()),
    "hook": lambda layer: layer.feed_forward.inner.register_forward_hook(lambda m, x, y: 2 * y),
    "earlier hook": lambda layer: layer.attention_norm.register_forward_pre_hook(
        lambda m, x: (x[0].clamp(0),)
    ),
}


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("case", SOME.values(), ids=SOME)
def test_changed_modules_compute_what_they_are_changed_to(case: Case, change: str) -> None:
    model = case.model()
    CHANGES[change](model.backbone.layers[-1])
    model.to(torch.float64)
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    expected = model.backbone(x, implementation="reference").hidden
    assert_same(model.backbone(x).hidden, expected, 1e-12, "hidden")
    reader = model.backbone.reader(None, 2)
    found = torch.cat([reader.read(token) for token in x.split(1, 1)], 1)
    assert_same(found, expected, 1e-12, "hidden")


@torch.no_grad()
@pytest.mark.parametrize(
    ("case", "names"),
    [
        # Its reader calls the parts of a layer, not the layer.
        (transformer_xl(), ["feed_forward.inner"]),
        (fast_weights(), ["attention", "feed_forward.inner", ""]),
        (feedback(), ["query", "feed_forward.inner", ""]),
    ],
)
def test_hooks_added_while_reading_are_called(case: Case, names: list[str]) -> None:
    model, calls = case.model(), []
    hooked = [model.backbone.layers[0].get_submodule(name) for name in names]
    reader = model.reader()
    reader.read(text(1, 1))
    handles = [part.register_forward_hook(lambda m, x, y: calls.append(m)) for part in hooked]
    reader.read(text(1, 1))
    assert calls == hooked
    for handle in handles:
        handle.remove()
    reader.read(text(1, 1))
    assert calls == hooked


def test_implementations_that_take_the_weights_alone_refuse() -> None:
    model, _ = adapted(feedback())
    x = torch.zeros(1, 2, 8, dtype=torch.float64)
    model.backbone(x, implementation="reference")
    with pytest.raises(
        MemspanError, match="a module has a hook or an adapter: remove it, merge it"
    ):
        model.backbone(x, implementation="fused")


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@every_case
def test_hooks_on_gradients_are_called(case: Case) -> None:
    model, called = copy.deepcopy(case.model()).train(), set()
    # PyTorch refuses one before an activation in place, in a line of its own.
    hooked = {name: part for name, part in products(model) if not name.endswith(".inner")}
    for name, part in hooked.items():
        part.register_full_backward_hook(lambda module, i, o, name=name: called.add(name))
    out = model(text(4, 6), targets=text(4, 6, 1))
    memory = model(text(4, 6), out.memory, targets=text(4, 6, 2))
    (memory.losses.sum() + out.losses.sum() + memory.auxiliary_loss).backward()
    assert called == set(hooked)


@pytest.mark.parametrize("part", ["layer", "attention"])
def test_replaced_forwards_are_called(part: str) -> None:
    """As accelerate's hooks replace them."""
    for case in (fast_weights(), feedback()):
        model, calls = case.model(), []
        layer = model.backbone.layers[0]
        changed = layer if part == "layer" else getattr(layer, "attention", None) or layer.query
        forward = changed.forward

        def counted(*given: Any, f: Any = forward, calls: list[int] = calls) -> Any:
            calls.append(1)
            return f(*given)

        changed.forward = counted
        with torch.no_grad():
            model(text(1, 1))
            model.reader().read(text(1, 1))
        assert len(calls) == 2


def test_dropout_is_within_the_feed_forward_module() -> None:
    model, calls = feedback(dropout=0.5).model().train(), []
    handle = model.backbone.layers[0].feed_forward.register_forward_hook(lambda *_: calls.append(1))
    model(text(1, 3))
    assert len(calls) == 3
    handle.remove()
    model.backbone.layers[0].feed_forward = Doubled(model.backbone.layers[0].feed_forward)
    with pytest.raises(MemspanError, match="replace its parts inner and outer, or train with"):
        model(text(1, 3))
