"""The rules of fast weights: the loops against the equations, the fast paths against the loops."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from golden import assert_same
from memspan.errors import MemspanError
from memspan.native import threads
from memspan.ops.fast_weights import compiled
from memspan.ops.fast_weights.feature_maps import DPFP, dpfp, sum_to_one
from memspan.ops.fast_weights.rules import (
    Chunking,
    RuleInputs,
    delta_rule,
    outer_product_rule,
    sum_rule,
)

Tensors = dict[str, Tensor]
RULES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "delta": delta_rule,
    "gated": delta_rule,
    "sum": sum_rule,
}
NO_LOOPS = not compiled.available(torch.zeros(()))
COMPILES = pytest.param("compiled", marks=pytest.mark.skipif(NO_LOOPS, reason="no loops in C"))
every_rule = pytest.mark.parametrize("rule", RULES)
fast = pytest.mark.parametrize("implementation", ["chunked", COMPILES])
every = pytest.mark.parametrize("implementation", ["reference", "chunked", COMPILES])


def inputs(
    rule: str,
    length: int,
    *,
    batch: int = 2,
    n_heads: int = 3,
    features: int = 6,
    width: int = 4,
    key_heads: int | None = None,
) -> Tensors:
    """Random tensors under the operations' own names, from a memory that is not empty."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    heads = (batch, n_heads, length)
    t = {
        "q": draw(*heads, features)[:, :key_heads],
        # Longer keys than this would make the delta rule diverge: beta |k|^2 < 2.
        "k": F.normalize(draw(*heads, features), dim=-1)[:, :key_heads],
        "v": draw(*heads, width),
        "weights": draw(batch, n_heads, features, width),
    }
    if rule == "gated":
        # All of the memory, almost all, or almost nothing of it.
        t["log_decay"] = -(4 * draw(*heads) - 4).exp()
        t["log_decay"][:, :, 8::7] = 0.0
    if rule in RULES and rule != "sum":
        t["beta"] = draw(*heads).sigmoid()
        # The ends of its range, where a division by beta would fail.
        t["beta"][:, :, ::5] = 0.0
        t["beta"][:, :, 1::5] = 1.0
    return t


def to_float32(given: Tensors) -> Tensors:
    return {name: t.float() for name, t in given.items()}


def repeated(given: Tensors) -> Tensors:
    """With each head of keys, of two, three times."""
    return given | {name: given[name].repeat_interleave(3, 1) for name in ("q", "k")}


def outcome(
    rule: str,
    given: Tensors,
    *,
    change: Callable[[Tensors], Tensors] = lambda t: t,
    wanted: Collection[str] | None = None,
    outputs: Collection[int] = (0, 1),
    **options: Any,
) -> Tensors:
    """Outputs, final memory, and the gradients of the ``wanted`` inputs (None: of every one) through
    these ``outputs``, of arguments that are first changed so."""
    leaves = {n: t.clone().requires_grad_(wanted is None or n in wanted) for n, t in given.items()}
    found = RULES[rule](**change(leaves), **options)
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in found]
    parts = [n for n in outputs if found[n].requires_grad]
    torch.autograd.backward([found[n] for n in parts], [upstream[n] for n in parts])
    # None and zeros say the same.
    gradients = {
        f"gradient of {n}": torch.zeros_like(t) if t.grad is None else t.grad
        for n, t in leaves.items()
        if t.requires_grad
    }
    return {"y": found[0], "after": found[1], **gradients}


def assert_all_same(found: Tensors, expected: Tensors, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same(found[name], tensor, tolerance, name)


def assert_reference(
    rule: str,
    given: Tensors,
    tolerance: float = 1e-11,
    change: Callable[[Tensors], Tensors] = lambda t: t,
    part: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """All that :func:`outcome` gives, or a ``part``, is that of the reference in double precision,
    whose arguments are first changed so."""
    part = part or {}
    exact = {name: t.double() for name, t in given.items()}
    expected = outcome(rule, exact, change=change, implementation="reference", **part)
    assert_all_same(outcome(rule, given, **part, **options), expected, tolerance)


def by_hand(t: Tensors, squash: Callable[[Tensor], Tensor]) -> Tensors:
    """The equations at the top of the module, head by head and token by token."""
    y = torch.empty_like(t["v"])
    after = t["weights"].clone()
    for b, h, n in itertools.product(*map(range, t["v"].shape[:3])):
        q = t["q"][b, h, n]
        k = t["k"][b, h, n]
        change = t["v"][b, h, n]
        w = after[b, h]
        if "log_decay" in t:
            w *= t["log_decay"][b, h, n].exp()
        if "beta" in t:
            change = t["beta"][b, h, n] * (change - k @ w)
        after[b, h] = squash(w + torch.outer(k, change))
        y[b, h, n] = q @ after[b, h]
    return {"y": y, "after": after}


def read(rule: str, given: Tensors, **options: Any) -> Tensors:
    return dict(zip(("y", "after"), RULES[rule](**given, **options), strict=True))


# ----- The loops


LOOPS = {rule: partial(run, implementation="reference") for rule, run in RULES.items()} | {
    "outer product": partial(outer_product_rule, activation="identity"),
    "outer product, tanh": partial(outer_product_rule, activation="tanh"),
}


@pytest.mark.parametrize("rule", LOOPS)
def test_loops_are_the_equations_and_gradients_their_derivatives(rule: str) -> None:
    t = inputs(rule, 5)
    y, after = LOOPS[rule](**t)
    squash = torch.tanh if "tanh" in rule else torch.clone
    assert_all_same({"y": y, "after": after}, by_hand(t, squash), 1e-12)
    t = inputs(rule, 3, batch=1)

    def run(*values: Tensor) -> tuple[Tensor, Tensor]:
        return LOOPS[rule](**dict(zip(t, values, strict=True)))

    assert torch.autograd.gradcheck(run, tuple(x.requires_grad_() for x in t.values()))


# ----- The fast paths


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize(
    ("length", "size"),
    [*((n, None) for n in (1, 32, 33, 63, 64, 300)), (130, 1), (130, 5), (130, 500)],
)
@every_rule
@fast
def test_fast_path_is_the_reference(
    implementation: str,
    rule: str,
    length: int,
    size: int | None,
    recompute: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For all sizes of chunks and numbers of saved memories; each head of keys serves three."""
    chunking = Chunking(recompute=recompute)
    if size is not None:
        chunking = Chunking(size, recompute)
        for name in ("SAVE_EVERY", "SAVE_EVERY_WITH_DECAY", "SAVE_EVERY_RECOMPUTING"):
            monkeypatch.setattr(compiled, name, size)
    given = inputs(rule, length, n_heads=6, key_heads=2)
    options = {"chunking": chunking, "implementation": implementation}
    assert_reference(rule, given, change=repeated, **options)


FEATURES: dict[str, Callable[[Tensor], Tensor]] = {
    "any": lambda x: sum_to_one(dpfp(x, 1), 1e-6),
    "dpfp-1": DPFP(1, 1e-6),
    "dpfp-3": DPFP(3, 1e-6),
    "dpfp-9": DPFP(9),
}


@pytest.mark.parametrize("name", FEATURES)
@every_rule
@every
def test_feature_map_inside(implementation: str, rule: str, name: str) -> None:
    """Applied by the operation, or before: the same numbers and gradients."""
    features = FEATURES[name]
    given = inputs(rule, 70, features=5)
    # Where dpfp's relu has its edge, and a key of which nothing is left.
    given["k"][:, :, ::7, 2] = 0.0
    given["k"][:, :, 3] = 0.0
    if name == "dpfp-9":
        given["k"] = given["k"] / 3
    n_features = features(given["k"]).shape[-1]
    given["weights"] = torch.randn(2, 3, n_features, 4, dtype=torch.float64)

    def outside(t: Tensors) -> Tensors:
        return t | {name: features(t[name]) for name in ("q", "k")}

    options = {"implementation": implementation, "feature_map": features}
    assert_reference(rule, given, change=outside, **options)


@pytest.mark.parametrize("width", [1, 8, 20, 37, 64])
@every_rule
@fast
def test_single_precision_matches_the_reference_at_any_width(
    implementation: str, rule: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values of any width; several threads; tensors whose numbers lie anyhow."""
    monkeypatch.setattr(threads, "LEAST_WORK", 1)
    given = to_float32(inputs(rule, 200, features=12, width=width))
    given |= {name: given[name].mT.contiguous().mT for name in ("k", "weights")}
    n_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert_reference(rule, given, 1e-5, implementation=implementation)
    finally:
        torch.set_num_threads(n_threads)


@every_rule
@fast
def test_some_gradients_alone_match_the_reference(implementation: str, rule: str) -> None:
    """Only some inputs, or only one output, take part."""
    given = inputs(rule, 40)
    for name, output in itertools.product(given, (0, 1)):
        part = {"wanted": [name], "outputs": [output]}
        assert_reference(rule, given, part=part, implementation=implementation)


@fast
def test_float32_does_not_drift(implementation: str) -> None:
    """20,000 tokens in single precision against double: the error stays that of one step."""
    t = inputs("delta", 20_000, batch=1, n_heads=1)
    run = partial(delta_rule, implementation=implementation)
    y, weights = run(**t)
    rough, rough_weights = run(**to_float32(t))
    error = (rough - y).abs().amax((0, 1, 3)).view(10, -1).amax(1)
    assert error.max() < 2e-5 * y.abs().max()
    assert error[-1] < 3 * error[0]
    assert_same(rough_weights, weights, 1e-5, "weights")


@pytest.mark.parametrize("outlier", [1e4, 1e6])
@every_rule
@fast
def test_a_large_value_leaves_gradients_of_earlier_tokens_alone(
    implementation: str, rule: str, outlier: float
) -> None:
    """The backward pass's memory before a token has lost nothing to rounding."""
    given = inputs(rule, 40)
    given["v"][:, :, 30] *= outlier
    exact = outcome(rule, given, outputs=[0], implementation="reference")
    rough = outcome(rule, to_float32(given), outputs=[0], implementation=implementation)
    found, expected = (side["gradient of q"][:, :, :30] for side in (rough, exact))
    assert_same(found, expected, 1e-6, "gradient of earlier queries")


@every_rule
@fast
def test_memory_between_tokens_is_not_kept(implementation: str, rule: str) -> None:
    """For the backward pass one memory is kept per chunk, or per 16 chunks: not one per token."""
    length = 1024
    features = 32
    width = 32
    t = inputs(rule, length, batch=1, n_heads=1, features=features, width=width)
    for tensor in t.values():
        tensor.requires_grad_()
    kept: list[int] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x.untyped_storage().nbytes())
        return x

    sizes = []
    for recompute in (False, True):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            RULES[rule](**t, chunking=Chunking(recompute=recompute), implementation=implementation)
        sizes.append(sum(kept))
    one_memory = features * width * 8
    assert sizes[0] < length * one_memory / 2
    assert sizes[1] < sizes[0]


# ----- Single tokens, decay, memories


@pytest.mark.parametrize("n_tokens", [1, 2, 7])
@pytest.mark.parametrize("width", [4, 40])
@pytest.mark.parametrize("rule", ["gated", "delta"])
@fast
def test_few_tokens_without_gradients_match_the_reference(
    implementation: str, rule: str, width: int, n_tokens: int
) -> None:
    """A path of its own in C: of heads that share keys, cut from a longer text."""
    t = inputs(rule, 10, n_heads=6, width=width, key_heads=2)
    one = {n: x if n == "weights" else x[:, :, 2 : 2 + n_tokens] for n, x in t.items()}
    one["weights"] = one["weights"].mT.contiguous().mT
    expected = read(rule, repeated(one), implementation="reference")
    assert_all_same(read(rule, one, implementation=implementation), expected, 1e-11)
    if implementation == "compiled":
        given = RuleInputs(**one, feature_map=None, chunking=Chunking())
        assert compiled.read_few(given) is not None
        for wrong in (
            {"log_decay": torch.ones_like(given.beta)},
            {"beta": given.beta[:, :1]},
            {"k": given.k.float()},
            {"q": given.q.clone().requires_grad_()},
            {"chunking": Chunking(size=0)},
            {"v": given.v[:, :5]},
            {"out": given.weights[:1]},
        ):
            assert compiled.read_few(given._replace(**wrong)) is None


@pytest.mark.parametrize("strongest", [-1e4, -torch.inf])
@fast
def test_tokens_after_a_strong_decay_are_exact(implementation: str, strongest: float) -> None:
    """Logarithms of weak decays are not lost beside that of a strong one in the same chunk; a decay to
    nothing is nothing, and its gradient, too."""
    given = inputs("gated", 60)
    given["log_decay"] = given["log_decay"].clamp(max=-1e-5) / 100
    given["log_decay"][:, :, 3::20] = strongest
    assert_reference("gated", to_float32(given), 3e-6, implementation=implementation)


@pytest.mark.parametrize("width", [5, 16])
@pytest.mark.parametrize("length", [9, 32, 70])
@fast
def test_empty_memories_are_memories(implementation: str, length: int, width: int) -> None:
    """Empty memories of some heads, as after a reset: their products may be skipped, gradients not."""
    given = inputs("gated", length, n_heads=4, width=width)
    given["weights"][0, 1:3] = 0
    given["weights"][1, 3] = 0
    for wanted in (given.keys(), given.keys() - {"weights"}):
        assert_reference("gated", given, part={"wanted": wanted}, implementation=implementation)


@pytest.mark.parametrize("length", [1, 5, 40])
@pytest.mark.parametrize("rule", ["delta", "gated"])
@every
def test_the_memory_can_be_written_in_place(implementation: str, rule: str, length: int) -> None:
    t = inputs(rule, length)
    expected = read(rule, t, implementation=implementation)
    transposed = torch.empty_like(t["weights"]).mT.contiguous().mT
    for out in (torch.empty_like(t["weights"]), transposed, t["weights"]):
        found = read(rule, t, implementation=implementation, out=out)
        assert found["after"] is out
        assert_all_same(found, expected, 0)


# ----- What does not fit


def test_the_compiled_loop_says_that_memory_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        forward = staticmethod(lambda *_: 0)

    monkeypatch.setattr(compiled.library, "functions", lambda *_: Full)
    with pytest.raises(MemspanError, match="memory is full: use a smaller batch"):
        delta_rule(**inputs("delta", 40), implementation="compiled")


def test_compiled_loop_is_refused_where_it_cannot_run() -> None:
    given = inputs("delta", 5)
    half = {name: x.half() for name, x in given.items()}
    with pytest.raises(MemspanError, match="needs a CPU"):
        delta_rule(**half, implementation="compiled")
