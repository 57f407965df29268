"""Derivatives of derivatives: a fast path has those of the reference, or one line that names it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap

from architectures import CASES, ONE_OF_EACH, Case
from golden import assert_same
from memspan import MemspanError, layers, ops
from memspan.models import Feedback, FeedbackConfig
from readings import every_case, some_memory, text

pytestmark = pytest.mark.filterwarnings("ignore:Using backward")
Leaves = dict[str, Tensor]
Function = Callable[[str | None], Tensor]
"""A result by an implementation."""
B = 1
H = 2
T = 3
S = 4
K = 3
V = 5
D = 4
NAMES_THE_REFERENCE = "implementation='reference'"


def hessian_vector(y: Tensor, wanted: list[Tensor]) -> Any:
    """By two calls of ``grad``, which prunes what does not lead to the inputs."""
    first = torch.autograd.grad(y.sin().sum(), wanted, create_graph=True, materialize_grads=True)
    along = sum((g * torch.linspace(-1, 1, g.numel()).view_as(g)).sum() for g in first)
    return torch.autograd.grad(along, wanted, materialize_grads=True)


def penalty(y: Tensor, wanted: list[Tensor]) -> Any:
    """Gradients of a loss that is not linear in the output, and the loss itself."""
    loss = y.sin().sum()
    first = torch.autograd.grad(loss, wanted, create_graph=True, materialize_grads=True)
    total = loss + sum(g.square().sum() for g in first)
    return torch.autograd.grad(total, wanted, materialize_grads=True)


def linear(y: Tensor, wanted: list[Tensor]) -> Any:
    """Gradients of a loss whose gradient by the output is constant."""
    loss = (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum()
    first = torch.autograd.grad(loss, wanted, create_graph=True, materialize_grads=True)
    total = loss + sum(g.square().sum() for g in first)
    return torch.autograd.grad(total, wanted, materialize_grads=True)


def by_backward(y: Tensor, wanted: list[Tensor]) -> Any:
    """The same by ``backward()``, which accumulates."""
    for tensor in wanted:
        tensor.grad = None
    y.sum().backward(create_graph=True)
    total = sum(t.grad.square().sum() for t in wanted if t.grad is not None)
    for tensor in wanted:
        tensor.grad = None
    if isinstance(total, Tensor) and total.requires_grad:
        total.backward()
    return [torch.zeros_like(t) if t.grad is None else t.grad for t in wanted]


WAYS = (hessian_vector, penalty, linear, by_backward)


def unless_refused(compute: Callable[[], Any]) -> Any:
    """None if it is refused in favour of the reference."""
    try:
        return compute()
    except MemspanError as error:
        if NAMES_THE_REFERENCE not in str(error):
            raise
        return None


def check(run: Function, leaves: Leaves, subsets: list[list[str]]) -> None:
    """The default is the reference, unless it is refused."""
    for wanted in subsets:
        for name, leaf in leaves.items():
            leaf.requires_grad_(name in wanted)
        tensors = [leaves[name] for name in wanted]
        for way in WAYS:
            expected = [g.clone() for g in way(run("reference"), tensors)]
            found = unless_refused(lambda way=way, tensors=tensors: way(run(None), tensors))
            for name, a, b in zip(wanted, found or expected, expected, strict=True):
                scale = 1 + float(b.abs().max())
                assert_same(a, b, 1e-8 * scale, f"{way.__name__} of {name}, {wanted} not frozen")
    for leaf in leaves.values():
        leaf.requires_grad_()
        leaf.grad = None


def subsets(leaves: Leaves) -> list[list[str]]:
    """All of them, and each by itself."""
    return [[*leaves], *([name] for name in leaves)]


def random(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=torch.float64)


def delta(given: Leaves, how: str | None, **options: Any) -> tuple[Tensor, ...]:
    return ops.delta_rule(**given, implementation=how, **options)  # type: ignore[arg-type]


def sums(given: Leaves, how: str | None) -> tuple[Tensor, ...]:
    return ops.sum_rule(**given, feature_map=ops.DPFP(1), implementation=how)  # type: ignore[arg-type]


def relative(given: Leaves, how: str | None) -> Tensor:
    q, k, v, *rest = given.values()
    mask = torch.ones(1, T, S, dtype=torch.bool).tril(S - T)
    return ops.relative_attention(q, k, v, ops.Positions(*rest), mask=mask, implementation=how)


def folded() -> Leaves:
    backbone = Feedback(FeedbackConfig(n_layers=2, d_model=D, n_heads=2, d_ff=5, memory_length=S))
    return {name: t.detach().double() for name, t in backbone.fold(S).tensors().items()}


def rule() -> Leaves:
    q = random(B, H, T, K)
    k = random(B, H, T, K)
    v = random(B, H, T, V)
    return {"q": q, "k": k, "v": v, "weights": random(B, H, K, V)}


def mapped() -> Leaves:
    return rule() | {"weights": random(B, H, 2 * K, V)}


def strengths() -> Leaves:
    return {"beta": torch.rand(B, H, T).double()}


OPERATIONS: dict[str, tuple[Callable[..., Any], Callable[[], Leaves]]] = {
    "delta": (delta, lambda: rule() | strengths()),
    "delta by chunks": (
        lambda given, how: delta(given, how or "chunked"),
        lambda: rule() | strengths(),
    ),
    "delta of dpfp": (
        lambda given, how: delta(given, how, feature_map=ops.DPFP(1)),
        lambda: mapped() | strengths(),
    ),
    "delta with a decay": (
        delta,
        lambda: rule() | strengths() | {"log_decay": -torch.rand(B, H, T).double()},
    ),
    "sum": (sums, mapped),
    "sum by chunks": (lambda given, how: sums(given, how or "chunked"), mapped),
    "convolution": (
        lambda given, how: ops.short_convolution(**given, implementation=how),
        lambda: {"x": random(B, T, D), "weight": random(D, 3), "before": random(B, 2, D)},
    ),
    "relative": (
        relative,
        lambda: {
            "q": random(B, H, T, K),
            "k": random(B, H, S, K),
            "v": random(B, H, S, K),
            "keys": random(H, S, K),
            "scores": random(H, S),
            "content_bias": random(H, K),
            "position_bias": random(H, K),
        },
    ),
    "dpfp": (
        lambda given, how: ops.dpfp(**given) if how is None else ops.DPFP().reference(**given),
        lambda: {"x": random(B, T, K)},
    ),
}


def result(found: Any) -> Tensor:
    parts = found if isinstance(found, tuple) else (found,)
    return torch.cat([part.flatten() for part in parts])


@pytest.mark.parametrize("name", OPERATIONS)
def test_second_derivatives_of_an_operation(name: str) -> None:
    torch.manual_seed(0)
    function, make = OPERATIONS[name]
    leaves = make()
    check(lambda how: result(function(leaves, how)), leaves, subsets(leaves))


@every_case
def test_second_derivatives_of_an_architecture(case: Case) -> None:
    """By all parameters, by those of one kind at a time, and by what is given."""
    model = case.model()
    memory = some_memory(model, 2)
    tokens = text(2, 3)
    targets = text(2, 3, 1)
    parameters = dict(model.named_parameters())
    leaves = {name: p for name, p in parameters.items() if p.requires_grad}

    def run(how: str | None) -> Tensor:
        out = model(tokens, memory, targets=targets, implementation=how)
        return torch.cat([out.losses.flatten(), out.auxiliary_loss.view(1)])

    first, *_, last = leaves
    check(run, leaves, [[*leaves], [first], [last]])


LAYERS = {
    "transformer-xl": (layers.TransformerXLLayer, layers.TransformerXLAttention, "xl-segment"),
    "compressive": (layers.CompressiveLayer, layers.CompressiveAttention, "compressive"),
    "fast-weights": (layers.FastWeightsLayer, layers.FastWeightsAttention, "fast-delta"),
    "gated-delta-net": (layers.GatedDeltaNetLayer, layers.GatedDeltaRule, "gated"),
    "infini": (layers.InfiniLayer, layers.InfiniAttention, "infini"),
}


@pytest.mark.parametrize("whole", [True, False], ids=["layer", "attention"])
@pytest.mark.parametrize("kind", LAYERS)
def test_second_derivatives_of_a_layer(kind: str, whole: bool) -> None:
    """By what is read, with weights frozen or not."""
    *kinds, case = LAYERS[kind]
    torch.manual_seed(0)
    config = dataclasses.replace(CASES[case].backbone)
    layer: Any = kinds[not whole](config).double()
    x = random(2, 3, 8)
    leaves = {"x": x} | dict(layer.named_parameters())
    check(lambda how: layer(x, None, how)[0], leaves, [["x"], [*leaves]])


def test_functional_hessians() -> None:
    """Second derivatives of the delta rule were zero."""
    torch.manual_seed(0)
    leaves = rule() | strengths()
    x = leaves.pop("k")

    def loss(k: Tensor, how: str | None = None) -> Tensor:
        return result(delta(leaves | {"k": k}, how)).sin().sum()

    for function in (torch.autograd.functional.hvp, torch.autograd.functional.vhp):
        with pytest.raises(MemspanError, match=NAMES_THE_REFERENCE):
            function(loss, x, torch.ones_like(x))
    with pytest.raises(MemspanError, match=NAMES_THE_REFERENCE):
        torch.autograd.functional.hessian(loss, x)
    exact = torch.autograd.functional.hessian(lambda k: loss(k, "reference"), x)
    assert exact.abs().max() > 0.1


# ----- Transforms


def forward_mode(run: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    return torch.func.jvp(run, (x,), (torch.ones_like(x),))


def dual_numbers(run: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    with torch.autograd.forward_ad.dual_level():
        return run(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))


def batched_gradients(run: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    x = x.clone().requires_grad_()
    y = run(x)
    return torch.autograd.grad(y, x, torch.eye(len(y)).double(), is_grads_batched=True)


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": lambda run, x: torch.func.grad(lambda t: run(t).sum())(x),
    "vmap": lambda run, x: torch.func.vmap(run)(torch.stack([x, x])),
    "jvp": forward_mode,
    "forward mode": dual_numbers,
    "batched gradients": batched_gradients,
}


# Torch compiles its own forward mode, and says where it maps slowly.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_transforms_compute_or_name_the_reference(name: str, transform: str) -> None:
    torch.manual_seed(0)
    function, make = OPERATIONS[name]
    leaves = make()
    for leaf, x in leaves.items():

        def run(t: Tensor, how: str | None = None, leaf: str = leaf) -> Tensor:
            return result(function(leaves | {leaf: t}, how))

        if unless_refused(lambda run=run, x=x: TRANSFORMS[transform](run, x)) is None:
            TRANSFORMS[transform](lambda t, run=run: run(t, "reference"), x)


WEIGHT_TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": lambda run, weights: grad(run)(weights),
    "jvp": lambda run, weights: jvp(run, (weights,), (weights,)),
    "vmap": lambda run, weights: vmap(run)({n: torch.stack([w, -w]) for n, w in weights.items()}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("transform", WEIGHT_TRANSFORMS)
@pytest.mark.parametrize("name", ONE_OF_EACH.values())
def test_transforms_of_weights_compute_or_name_the_reference(name: str, transform: str) -> None:
    """Also where torch has no rule for a function of its own."""
    model = CASES[name].model(torch.float32).eval()
    tokens = text(2, 3)
    targets = text(2, 3, 1)
    weights = {n: p.detach() for n, p in model.named_parameters()}

    def run(values: dict[str, Tensor], how: str | None = None) -> Tensor:
        options = {"targets": targets, "implementation": how}
        return functional_call(model, values, (tokens,), options).loss

    compute = WEIGHT_TRANSFORMS[transform]
    expected = compute(partial(run, how="reference"), weights)
    found = unless_refused(lambda: compute(run, weights))
    if found is not None:
        torch.testing.assert_close(found, expected)


# ----- One graph


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["fast-delta", "gated"])
def test_no_graph_drops_second_derivatives(name: str) -> None:
    model = CASES[name].model()
    tokens = text(1, 3)
    targets = text(1, 3, 1)
    compiled = torch.compile(model, backend="aot_eager")
    parameters = list(model.parameters())
    loss = compiled(tokens, targets=targets).loss
    with pytest.raises(RuntimeError, match=r"double backward|a leaf Variable|donated buffers"):
        hessian_vector(loss, parameters)
