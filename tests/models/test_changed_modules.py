"""Nothing stands in silently: whatever a user puts into a model, of which no kernel knows, the model,
its readers and training compute what the changed modules say."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from architectures import CASES, ONE_OF_EACH, Case, compressive, feedback, transformer_xl
from golden import assert_same
from memspan.errors import MemspanError
from memspan.models import LanguageModel
from memspan.models.options import EmbeddingConfig
from readings import assert_memories_equal, text

pytestmark = pytest.mark.hardening
VARIED = ("xl-segment-gated", "fast-delta-favor", "feedback-per-layer")
SOME = {name: CASES[name].with_options(n_layers=1) for name in (*ONE_OF_EACH.values(), *VARIED)}
some_cases = pytest.mark.parametrize("case", SOME.values(), ids=SOME)


def scaled(output: Any) -> Any:
    """Scale a module's output by 0.7."""
    if isinstance(output, Tensor):
        return 0.7 * output
    if isinstance(output, tuple):
        return (0.7 * output[0], *output[1:])
    found = {name: vars(output).get(name) for name in ("hidden", "logits", "losses")}
    times = {name: 0.7 * tensor for name, tensor in found.items() if tensor is not None}
    return dataclasses.replace(output, **times)


# ----- What people do to a module: each returns whether it could be done to this one


def gate(part: nn.Module) -> bool:
    """A subclass with a parameter that its outputs are multiplied by."""

    def forward(self: Any, *given: Any, **named: Any) -> Any:
        output = super(kind, self).forward(*given, **named)
        weight = self.gate.sigmoid()
        if isinstance(output, Tensor):
            return weight * output
        return scaled(output)

    original = type(part)
    if original.forward is nn.Module.forward or not callable(getattr(original, "forward", None)):
        return False
    kind = type("Gated", (original,), {"forward": forward})
    part.register_parameter("gate", nn.Parameter(torch.tensor(0.3, dtype=torch.float64)))
    part.__class__ = kind
    return True


def hook(part: nn.Module) -> bool:
    part.register_forward_hook(lambda module, given, output: scaled(output))
    return True


def pre_hook(part: nn.Module) -> bool:
    def times(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        # Tokens are not scaled, and the tensors of a parametrisation are no arguments.
        if not given or not given[0].is_floating_point():
            return None
        return (0.7 * given[0], *given[1:])

    part.register_forward_pre_hook(times)
    return True


def replaced_forward(part: nn.Module) -> bool:
    original = part.forward
    part.forward = lambda *given, **named: scaled(original(*given, **named))  # type: ignore
    return True


class Times(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.7 * x


def parametrisation(part: nn.Module) -> bool:
    names = [name for name, p in part.named_parameters(recurse=False) if name.isidentifier()]
    for name in names:
        parametrize.register_parametrization(part, name, Times())
    return bool(names)


class Passing(nn.Module):
    """Looks like the module that it wraps, as PEFT's adapters do, but is another one."""

    def __init__(self, within: nn.Module) -> None:
        super().__init__()
        self.within = within

    def forward(self, *given: Any, **named: Any) -> Any:
        return scaled(self.within(*given, **named))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("within"), name)


def extra_parameter(part: nn.Module) -> bool:
    part.register_parameter("extra", nn.Parameter(torch.zeros(1, dtype=torch.float64)))
    return True


def attribute(part: nn.Module) -> bool:
    """Attributes that methods read: another activation, another epsilon."""
    found = [name for name in ("activation", "eps") if hasattr(part, name)]
    for name in found:
        setattr(part, name, {"activation": F.silu, "eps": 0.5}[name])
    return bool(found)


def not_a_parameter(part: nn.Module) -> bool:
    """A weight that is not trained."""
    if type(part) is not nn.Linear:
        return False
    weight = part.weight.detach()
    del part.weight
    part.register_buffer("weight", 1.1 * weight)
    return True


def wrapper(model: nn.Module, name: str) -> bool:
    part = model.get_submodule(name)
    if not name or type(part).forward is nn.Module.forward:
        return False
    model.set_submodule(name, Passing(part))
    return True


ON_A_PART: list[Callable[..., bool]] = [
    *(gate, hook, pre_hook, replaced_forward, parametrisation),
    *(extra_parameter, attribute, not_a_parameter),
]


def put_in(model: nn.Module, name: str, kind: Callable[..., bool]) -> bool:
    """Change the module of this name; False where that cannot be done to it."""
    if kind is wrapper:
        return wrapper(model, name)
    return kind(model.get_submodule(name))


# ----- What must be the same


def assert_as_reference(model: LanguageModel) -> None:
    """Model, readers of segments and of single tokens, with targets or without, and training."""
    with torch.no_grad():
        reader = model.reader(batch_size=2)
        scorer = model.reader(batch_size=2)
        memory = None
        for n, length in enumerate((1, 3, 1, 1, 2)):
            tokens = text(2, length, n)
            scored = model(tokens, memory, targets=tokens, implementation="reference")
            expected = model(tokens, memory, implementation="reference")
            found = model(tokens, memory)
            assert_same(found.logits, expected.logits, 1e-10, "logits")
            assert_memories_equal(found.memory, expected.memory, 1e-10)
            assert_same(reader.read(tokens), expected.logits, 1e-10, "logits of the reader")
            losses = scorer.read(tokens, targets=tokens)
            assert_same(losses, scored.losses, 1e-10, "losses of the reader")
            memory = expected.memory
        assert_memories_equal(reader.memory, memory, 1e-10)
    assert_same_gradients(model)


def assert_same_gradients(model: LanguageModel) -> None:
    def gradients(implementation: str | None) -> Sequence[Tensor]:
        texts = [text(2, 4, n) for n in range(3)]
        memory = None
        loss = torch.zeros(())
        for tokens, targets in pairwise(texts):
            out = model(tokens, memory, targets=targets, implementation=implementation)
            memory = out.memory
            loss = loss + out.losses.sum()
        loss = loss + out.auxiliary_loss
        return torch.autograd.grad(loss, [*model.parameters()], materialize_grads=True)

    model.train()
    names = [name for name, _ in model.named_parameters()]
    for name, ours, theirs in zip(names, gradients(None), gradients("reference"), strict=True):
        # A gate's is a sum, of which rounding may be all that is left.
        close = 1e-9 * float(theirs.abs().max()) + 1e-14
        torch.testing.assert_close(ours, theirs, rtol=0, atol=close, msg=f"{name}: {{}}".format)
    model.eval()


@some_cases
def test_changing_any_module_changes_the_reader(case: Case) -> None:
    """With the kinds of change in turn: that which can be made and was made least recently."""
    original = case.model()
    kinds = [*ON_A_PART, wrapper]
    turns = [(name, kinds) for name, _ in original.named_modules()]
    turns += [(name, [wrapper]) for name in ("backbone", "embedding", "head")]
    for name, possible in turns:
        model = copy.deepcopy(original)
        kind = next(kind for kind in possible if put_in(model, name, kind))
        possible.remove(kind)
        possible.append(kind)
        try:
            assert_as_reference(model)
        except AssertionError as error:
            raise AssertionError(f"{kind.__name__} at {name!r}") from error


@some_cases
def test_dropout_that_is_on_in_evaluation(case: Case) -> None:
    """As for samples of a posterior (Gal and Ghahramani 2016): here it drops everything."""
    model = case.with_options(dropout=0.5).model()
    dropouts = [part for part in model.backbone.modules() if isinstance(part, nn.Dropout)]
    for part in dropouts:
        part.p = 1.0
        part.train()
    with torch.no_grad():
        tokens = text(1, 3)
        assert_same(model.reader().read(tokens), model(tokens).logits, 1e-10, "logits")


@torch.no_grad()
@pytest.mark.parametrize("case", [transformer_xl(), compressive()], ids=["xl", "compressive"])
def test_changed_modules_are_read_with_another_span(case: Case) -> None:
    """Hooks that change nothing: the same numbers as those of the reader that knows the modules."""
    tokens = text(2, 30)
    model = case.model()
    options = {"attention_span": "fixed", "clamp_length": 3}
    expected = model.reader(batch_size=2, **options)
    handle = model.backbone.layers[0].register_forward_hook(lambda *_: None)
    reader = model.reader(batch_size=2, **options)
    handle.remove()
    for part in tokens.split([5, 1, 9, 1, 14], 1):
        assert_same(reader.read(part), expected.read(part), 1e-10, "logits")
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(MemspanError, match="attention_span, clamp_length: only a LanguageModel"):
        model.reader(**options)


def test_implementations_that_take_the_weights_alone_refuse() -> None:
    backbone = feedback().model().backbone
    x = torch.zeros(1, 2, 8, dtype=torch.float64)
    backbone(x, implementation="fused")
    hook(backbone.layers[0].query)
    backbone(x, implementation="reference")
    with pytest.raises(MemspanError, match="neither adaptive spans nor changed modules"):
        backbone(x, implementation="fused")


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@some_cases
def test_hooks_on_gradients_are_called(case: Case) -> None:
    model = case.model().train()
    called = set()
    # PyTorch refuses one before an activation in place, in a line of its own.
    hooked = {
        name: part
        for name, part in model.named_modules()
        if type(part) is nn.Linear and not name.endswith(".inner")
    }
    for name, part in hooked.items():
        part.register_full_backward_hook(lambda module, i, o, name=name: called.add(name))
    out = model(text(4, 6), targets=text(4, 6, 1))
    more = model(text(4, 6), out.memory, targets=text(4, 6, 2))
    (more.losses.sum() + out.losses.sum() + more.auxiliary_loss).backward()
    assert called == set(hooked)


@torch.no_grad()
@pytest.mark.parametrize("clusters", [(), (4, 7)], ids=["plain", "adaptive"])
def test_losses_are_those_of_the_logits(clusters: tuple[int, ...]) -> None:
    model = transformer_xl(EmbeddingConfig(cutoffs=clusters)).model()
    tokens = text(2, 5)
    targets = text(2, 5, 1)
    wrapper(model, "head")
    losses = F.cross_entropy(model(tokens).logits.mT, targets, reduction="none")
    assert_same(model(tokens, targets=targets).losses, losses, 1e-10, "losses")
    reader = model.reader(batch_size=2)
    assert_same(reader.read(tokens, targets=targets), losses, 1e-10, "losses of the reader")
