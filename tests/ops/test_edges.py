"""Operations where sizes are 0 or 1, values have another width than keys, tensors are views, types are
short: every implementation has the same answer, or one line."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from memspan import MemspanError, ops
from memspan.models import Feedback, FeedbackConfig
from memspan.ops.convolution import IMPLEMENTATIONS as CONVOLUTIONS
from memspan.ops.delta_rules.rule import IMPLEMENTATIONS as GENERALIZED
from memspan.ops.fast_weights.rules import IMPLEMENTATIONS as RULES
from memspan.ops.feedback.recurrence import IMPLEMENTATIONS as RECURRENCES
from memspan.ops.relative import IMPLEMENTATIONS as ATTENTIONS

Given = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """One letter each, as in the operations' documentation."""

    B: int = 2
    H: int = 2
    T: int = 5
    K: int = 3
    V: int = 4


SIZES = {
    "usual": Sizes(),
    "no rows": Sizes(B=0),
    "no tokens": Sizes(T=0),
    "one token": Sizes(T=1),
    "one row and head": Sizes(B=1, H=1),
    "narrow keys": Sizes(K=1),
    "narrow values": Sizes(V=1),
    "one of everything": Sizes(1, 1, 1, 1, 1),
    "as wide values": Sizes(V=3),
    "40 tokens": Sizes(T=40),
}


def random(*sizes: int) -> Tensor:
    return torch.randn(*sizes)


def rule(s: Sizes) -> Given:
    q, k = (torch.nn.functional.normalize(random(s.B, s.H, s.T, s.K), dim=-1) for _ in "qk")
    return {"q": q, "k": k, "v": random(s.B, s.H, s.T, s.V), "weights": random(s.B, s.H, s.K, s.V)}


def delta(s: Sizes) -> Given:
    return rule(s) | {"beta": torch.rand(s.B, s.H, s.T)}


def decaying(s: Sizes) -> Given:
    return delta(s) | {"log_decay": -torch.rand(s.B, s.H, s.T)}


def generalized(s: Sizes) -> Given:
    key = {name: random(s.B, s.H, s.T, s.K) / 4 for name in ("erase", "lookup")}
    return rule(s) | key | {"log_decay": -torch.rand(s.B, s.H, s.T, s.K)}


def mapped(s: Sizes) -> Given:
    weights = random(s.B, s.H, 2 * s.K, s.V)
    return delta(s) | {"weights": weights, "feature_map": ops.DPFP(1, 1e-3)}


def relative(s: Sizes) -> Given:
    n_keys = s.T + 2
    positions = ops.Positions(random(s.H, n_keys, s.K), None, random(s.H, s.K))
    mask = torch.ones(1, s.T, n_keys, dtype=torch.bool).tril(2)
    q = random(s.B, s.H, s.T, s.K)
    k = random(s.B, s.H, n_keys, s.K)
    return {
        "q": q,
        "k": k,
        "v": random(s.B, s.H, n_keys, s.V),
        "positions": positions,
        "mask": mask,
    }


def convolution(s: Sizes) -> Given:
    width = s.H * s.K
    return {
        "x": random(s.B, s.T, width),
        "weight": random(width, 3),
        "before": random(s.B, 2, width),
    }


def recurrence(s: Sizes) -> Given:
    width = s.H * s.K
    sizes: Any = {"n_layers": 2, "d_model": width, "n_heads": s.H, "d_ff": s.V, "memory_length": 4}
    with torch.no_grad():
        weights = Feedback(FeedbackConfig(**sizes)).fold(4)
    length = torch.arange(s.B) % 4
    return {
        "x": random(s.B, s.T, width),
        "old": random(s.B, 3, width),
        "visible": length[:, None] + torch.arange(s.T),
        "span": 4,
        "weights": weights,
    }


def one_token(s: Sizes) -> Given:
    return {
        "q": random(s.B, s.H, s.K),
        "k": random(s.B, s.H, s.T, s.K),
        "v": random(s.B, s.H, s.T, s.K),
        "distances": ops.Distances(random(s.T, s.H, s.K), random(s.T, s.H)),
        "content_bias": random(s.H, s.K),
        "visible": torch.rand(s.B, s.T) < 0.7,
    }


OPERATIONS: dict[str, tuple[Callable[..., Any], Callable[[Sizes], Given], tuple[str, ...]]] = {
    "delta": (ops.delta_rule, delta, (*RULES,)),
    "delta with a decay": (ops.delta_rule, decaying, (*RULES,)),
    "delta of dpfp": (ops.delta_rule, mapped, (*RULES,)),
    "generalized delta": (ops.generalized_delta_rule, generalized, (*GENERALIZED,)),
    "sum": (ops.sum_rule, rule, (*RULES,)),
    "convolution": (ops.short_convolution, convolution, (*CONVOLUTIONS,)),
    "relative": (ops.relative_attention, relative, (*ATTENTIONS,)),
    "recurrence": (ops.feedback_recurrence, recurrence, (*RECURRENCES,)),
    "outer product": (
        lambda implementation, **given: ops.outer_product_rule(**given, activation="tanh"),
        rule,
        (),
    ),
    "one token": (lambda implementation, **given: ops.feedback_attention(**given), one_token, ()),
    "dpfp": (
        lambda implementation, x: ops.dpfp(x, 1, 1e-3),
        lambda s: {"x": random(s.B, s.T, s.K)},
        (),
    ),
    "favor": (
        lambda implementation, **given: ops.favor(**given),
        lambda s: {
            "x": random(s.B, s.T, s.K),
            "projection": ops.orthogonal_projection(s.K, 4),
        },
        (),
    ),
}
every_operation = pytest.mark.parametrize("operation", OPERATIONS)


def of_floats(f: Callable[[Tensor], Tensor], value: Any) -> Any:
    """``f`` of all floating-point tensors within."""
    if isinstance(value, Tensor):
        return f(value) if value.is_floating_point() else value
    if isinstance(value, tuple):
        parts = [of_floats(f, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, dict):
        return {name: of_floats(f, part) for name, part in value.items()}
    if dataclasses.is_dataclass(value) and hasattr(value, "tensors"):
        changed: Any = {name: f(part) for name, part in value.tensors().items()}
        return dataclasses.replace(value, **changed)  # type: ignore[type-var]
    return value


def outcome(operation: str, implementation: str | None, given: Given, grad: bool) -> Any:
    """Results and the gradients of all tensors, or the line that refuses."""
    leaves: list[Tensor] = []

    def leaf(x: Tensor) -> Tensor:
        """A view stays one: it is what requires a gradient, through a node that changes nothing."""
        leaves.append(x.new_zeros(x.shape).requires_grad_())
        return x + leaves[-1] if x.is_contiguous() else x.detach().requires_grad_()

    run = OPERATIONS[operation][0]
    try:
        with torch.set_grad_enabled(grad):
            found = run(
                **(of_floats(leaf, given) if grad else given), implementation=implementation
            )
    except MemspanError as error:
        return str(error)
    results = [*found] if isinstance(found, tuple) else [found]
    if grad:
        total = sum(y.float().sin().sum() for y in results)
        assert isinstance(total, Tensor)
        if total.requires_grad:
            results += torch.autograd.grad(total, leaves, materialize_grads=True)
    return results


def cannot_run(found: Any) -> bool:
    return isinstance(found, str) and found.startswith("the ") and " implementation " in found


def assert_all_alike(operation: str, given: Given, tolerance: float, grad: bool) -> None:
    """Every implementation, and the choice without a name, are as the last of the table."""
    names = OPERATIONS[operation][2]
    expected = outcome(operation, names[-1] if names else None, given, grad)
    for name in (None, *names[:-1]):
        found = outcome(operation, name, given, grad)
        if name is not None and cannot_run(found):
            continue
        if isinstance(expected, str):
            assert found == expected, name
            continue
        assert not isinstance(found, str), (name, found)
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == b.dtype, name
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=f"{name}: {a} {b}")


@every_operation
@pytest.mark.parametrize("grad", [False, True], ids=["plain", "gradients"])
@pytest.mark.parametrize("sizes", SIZES)
def test_sizes(operation: str, sizes: str, grad: bool) -> None:
    torch.manual_seed(0)
    given = OPERATIONS[operation][1](SIZES[sizes])
    assert_all_alike(operation, given, 2e-4, grad)


def spread(x: Tensor) -> Tensor:
    """The same numbers at every second place."""
    return torch.stack([x, x], -1)[..., 0]


def turned(x: Tensor) -> Tensor:
    """The same numbers, stored with the last dimension first."""
    return x.movedim(-1, 0).contiguous().movedim(0, -1)


def widened(x: Tensor) -> Tensor:
    """The first row in all rows, which are one."""
    return x[:1].expand(x.shape)


@every_operation
@pytest.mark.parametrize("view", [spread, turned, widened])
def test_views(operation: str, view: Callable[[Tensor], Tensor]) -> None:
    """They are read as copies of them are."""
    torch.manual_seed(0)
    given = OPERATIONS[operation][1](Sizes())
    seen = of_floats(view, given)
    copied = of_floats(lambda x: view(x).contiguous(), given)
    for name in (None, *OPERATIONS[operation][2]):
        found, expected = (outcome(operation, name, g, False) for g in (seen, copied))
        if isinstance(expected, str):
            assert found == expected
            continue
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@every_operation
@pytest.mark.parametrize("grad", [False, True], ids=["plain", "gradients"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_short_types(operation: str, dtype: torch.dtype, grad: bool) -> None:
    torch.manual_seed(0)
    given = of_floats(lambda x: x.to(dtype), OPERATIONS[operation][1](Sizes()))
    assert_all_alike(operation, given, 0.15 if dtype == torch.bfloat16 else 0.03, grad)


def test_no_memory_is_written_into_an_expanded_tensor() -> None:
    out = torch.zeros(1, 2, 3, 4).expand(2, 2, 3, 4)
    with pytest.raises(MemspanError, match="out has numbers that share their place"):
        ops.delta_rule(**decaying(Sizes()), out=out)


# ----- Autocast


@pytest.mark.parametrize("operation", sorted({*OPERATIONS} - {"one token", "favor"}))
def test_autocast_rounds_nothing(operation: str) -> None:
    """By any implementation; attention of a single token and favor are plain products."""
    torch.manual_seed(0)
    given = OPERATIONS[operation][1](Sizes())
    for name in (None, *OPERATIONS[operation][2]):
        expected = outcome(operation, name, given, False)
        with torch.autocast("cpu"):
            found = outcome(operation, name, given, False)
        if isinstance(expected, str):
            assert found == expected
            continue
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# ----- Names


def names_of(function: Callable[..., Any]) -> list[str]:
    """Its arguments that are names, by their annotations."""
    parameters = inspect.signature(function).parameters.values()
    return [
        p.name for p in parameters if "str" in str(p.annotation) or "Literal" in str(p.annotation)
    ]


FUNCTIONS = [
    f for name in ops.__all__ if inspect.isfunction(f := getattr(ops, name)) and names_of(f)
]
ARGUMENTS = {
    "delta_rule": delta,
    "generalized_delta_rule": generalized,
    "sum_rule": rule,
    "outer_product_rule": lambda s: rule(s) | {"activation": "tanh"},
    "short_convolution": convolution,
    "relative_attention": relative,
    "feedback_recurrence": recurrence,
}


@pytest.mark.parametrize("wrong", ["Tanh", "Reference", "silu", "", 3])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_names_that_are_not_known_are_refused(function: Callable[..., Any], wrong: object) -> None:
    given = ARGUMENTS[function.__name__](Sizes())
    function(**given)
    for name in names_of(function):
        with pytest.raises(MemspanError, match=re.escape(repr(wrong))):
            function(**given | {name: wrong})
