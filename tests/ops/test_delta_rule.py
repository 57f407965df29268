"""The rules of fast weights: the loops against the equations, the fast paths against the loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from delta_rules import (
    RULES,
    assert_all_same,
    by_hand,
    every,
    every_rule,
    fast,
    inputs,
    with_gradient,
)
from torch import Tensor

from golden import assert_same
from memspan.errors import MemspanError
from memspan.ops.fast_weights import compiled
from memspan.ops.fast_weights.feature_maps import DPFP, dpfp, sum_to_one
from memspan.ops.fast_weights.rules import Chunking, RuleInputs, delta_rule, outer_product_rule
from memspan.ops.native import threads

LENGTHS = [1, 63, 64, 100, 300]


# ----- The loops


@every_rule
def test_reference_is_the_equation(rule: str) -> None:
    t = inputs(rule, 5)
    assert_all_same(RULES[rule](**t, implementation="reference"), by_hand(t), 1e-12)


@pytest.mark.parametrize("activation", ["tanh", "identity"])
def test_outer_product_is_the_equation(activation: str) -> None:
    t = inputs("sum", 5)
    squash = math.tanh if activation == "tanh" else lambda x: x
    assert_all_same(outer_product_rule(**t, activation=activation), by_hand(t, squash), 1e-12)
    tensors = tuple(with_gradient(inputs("sum", 3, batch=1)).values())
    assert torch.autograd.gradcheck(partial(outer_product_rule, activation=activation), tensors)


# ----- The fast paths


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("length", LENGTHS)
@every_rule
@fast
def test_fast_path_is_the_reference(
    implementation: str, rule: str, length: int, recompute: bool
) -> None:
    """Outputs, final memory, and the gradient of every input through both of them."""
    given = inputs(rule, length)
    theirs, ours = with_gradient(given), with_gradient(given)
    expected = RULES[rule](**theirs, implementation="reference")
    found = RULES[rule](
        **ours, chunking=Chunking(recompute=recompute), implementation=implementation
    )
    assert_all_same(found, list(expected), 1e-11)
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(e.shape, generator=generator, dtype=torch.float64) for e in expected]
    torch.autograd.backward(expected, upstream)
    torch.autograd.backward(found, upstream)
    for name, tensor in ours.items():
        assert_same(tensor.grad, theirs[name].grad, 1e-11, f"gradient of {name}")


@pytest.mark.parametrize("save_every", [1, 5, 40])
@pytest.mark.parametrize("rule", ["delta", "gated"])
@pytest.mark.skipif(not compiled.available(torch.zeros(())), reason="no C compiler")
def test_any_number_of_saved_memories(
    rule: str, save_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "SAVE_EVERY", save_every)
    theirs, ours = with_gradient(inputs(rule, 90)), with_gradient(inputs(rule, 90))
    for t, implementation in ((theirs, "reference"), (ours, "compiled")):
        outputs = delta_rule(**t, implementation=implementation)
        sum(x.sin().sum() for x in outputs).backward()
    for name, tensor in ours.items():
        assert_same(tensor.grad, theirs[name].grad, 1e-11, f"gradient of {name}")


@pytest.mark.parametrize("chunk_size", [1, 3, 500])
@every_rule
def test_any_chunk_size(rule: str, chunk_size: int) -> None:
    t = inputs(rule, 130)
    expected = RULES[rule](**t, implementation="reference")
    found = RULES[rule](**t, chunking=Chunking(chunk_size), implementation="chunked")
    assert_all_same(found, list(expected), 1e-11)


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
    upstream = torch.randn(2, 3, 70, 4, dtype=torch.float64)
    t = with_gradient(given)
    y, after = RULES[rule](**t, feature_map=features, implementation=implementation)
    torch.autograd.backward((y, after), (upstream, torch.ones_like(after)))
    result = [y, after, *(x.grad for x in t.values())]
    t = with_gradient(given)
    outside = t | {"q": features(t["q"]), "k": features(t["k"])}
    y, after = RULES[rule](**outside, implementation="reference")
    torch.autograd.backward((y, after), (upstream, torch.ones_like(after)))
    for a, b in zip(result, [y, after, *(x.grad for x in t.values())], strict=True):
        assert_same(a, b, 1e-11, "inside against outside")


@pytest.mark.parametrize("width", [1, 8, 20, 37, 64])
@every_rule
@fast
def test_any_width_in_single_precision(
    implementation: str, rule: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values of any width; several threads; tensors whose numbers lie anyhow."""
    monkeypatch.setattr(threads, "LEAST_WORK", 1)
    given = inputs(rule, 200, features=12, width=width, dtype=torch.float32)
    given["k"] = given["k"].transpose(2, 3).contiguous().transpose(2, 3)
    theirs = with_gradient({name: x.double() for name, x in given.items()})
    ours = with_gradient(given)
    expected = RULES[rule](**theirs, implementation="reference")
    n_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        found = RULES[rule](**ours, implementation=implementation)
        sum(x.square().sum() for x in found).backward()
    finally:
        torch.set_num_threads(n_threads)
    sum(x.square().sum() for x in expected).backward()
    assert_all_same(found, [x.float() for x in expected], 1e-5)
    for name, tensor in ours.items():
        assert_same(tensor.grad, theirs[name].grad.float(), 3e-5, f"gradient of {name}")


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("length", [1, 7])
@every_rule
@fast
def test_gradients_are_the_derivatives(
    implementation: str, rule: str, length: int, recompute: bool
) -> None:
    t = with_gradient(inputs(rule, length, batch=1, n_heads=2, features=3, width=2))

    def run(*values: Tensor) -> tuple[Tensor, Tensor]:
        arguments = dict(zip(t, values, strict=True))
        chunking = Chunking(3, recompute)
        return RULES[rule](**arguments, chunking=chunking, implementation=implementation)

    assert torch.autograd.gradcheck(run, tuple(t.values()))


@every_rule
@fast
def test_a_part_of_the_gradients(implementation: str, rule: str) -> None:
    """Where only some inputs, or only one output, take part."""
    given = inputs(rule, 40)
    for name in given:
        for output in (0, 1):
            grads = []
            for each in (implementation, "reference"):
                t = dict(given) | {name: given[name].clone().requires_grad_()}
                found = RULES[rule](**t, implementation=each)[output]
                if found.requires_grad:
                    grads.append(torch.autograd.grad(found.square().sum(), t[name])[0])
            # The final memory knows nothing of the queries; a fused path may say so with zeros.
            if len(grads) == 2:
                assert_same(grads[0], grads[1], 1e-11, name)
            else:
                assert (name, output) == ("q", 1)
                assert not any(g.any() for g in grads)


@fast
def test_float32_does_not_drift(implementation: str) -> None:
    """20,000 tokens in single precision against double: the error stays that of one step."""
    t = inputs("delta", 20_000, batch=1, n_heads=1)
    run = partial(delta_rule, implementation=implementation)
    y, weights = run(**t)
    rough, rough_weights = run(**{name: x.float() for name, x in t.items()})
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
    """What the backward pass takes for the memory before a token has lost nothing to rounding."""
    given = inputs(rule, 40)
    given["v"][:, :, 30] *= outlier
    found = []
    for dtype, each in ((torch.float64, "reference"), (torch.float32, implementation)):
        t = with_gradient({name: x.to(dtype) for name, x in given.items()})
        y, _ = RULES[rule](**t, implementation=each)
        y.sum().backward()
        found.append(t["q"].grad[:, :, :30])
    assert_same(found[1], found[0], 1e-6, "gradient of earlier queries")


@every_rule
@fast
def test_memory_between_tokens_is_not_kept(implementation: str, rule: str) -> None:
    """For the backward pass one memory is kept per chunk, or per 16 chunks: not one per token."""
    length, features, width = 1024, 32, 32
    t = with_gradient(inputs(rule, length, batch=1, n_heads=1, features=features, width=width))
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


# ----- Decay


@pytest.mark.parametrize("length", [1, 32, 33, 100])
@fast
def test_heads_of_keys_serve_several_of_values(implementation: str, length: int) -> None:
    given = inputs("gated", length, n_heads=6)
    given |= {name: given[name][:, :2] for name in ("q", "k")}
    theirs, ours = with_gradient(given), with_gradient(given)
    repeated = {name: theirs[name].repeat_interleave(3, 1) for name in ("q", "k")}
    expected = delta_rule(**theirs | repeated, implementation="reference")
    found = delta_rule(**ours, implementation=implementation)
    assert_all_same(found, list(expected), 1e-11)
    for outputs in (expected, found):
        sum(x.sin().sum() for x in outputs).backward()
    for name, tensor in ours.items():
        assert_same(tensor.grad, theirs[name].grad, 1e-11, f"gradient of {name}")
    shared = {name: given[name] for name in ("q", "k", "v", "beta", "weights")}
    expected = delta_rule(
        **shared | {n: x.detach() for n, x in repeated.items()}, implementation=implementation
    )
    assert_all_same(delta_rule(**shared, implementation=implementation), list(expected), 1e-12)


@pytest.mark.parametrize("width", [4, 40])
@fast
def test_one_token_without_gradients(implementation: str, width: int) -> None:
    """A path of its own in C: of heads that share keys, cut from a longer text."""
    t = inputs("gated", 4, n_heads=6, width=width)
    one = {name: x if name == "weights" else x[:, :, 2:3] for name, x in t.items()}
    one |= {name: one[name][:, :2] for name in ("q", "k")}
    one["weights"] = one["weights"].mT.contiguous().mT
    repeated = {name: one[name].repeat_interleave(3, 1) for name in ("q", "k")}
    expected = delta_rule(**one | repeated, implementation="reference")
    assert_all_same(delta_rule(**one, implementation=implementation), list(expected), 1e-11)
    if implementation == "compiled":
        given = RuleInputs(**one, feature_map=None, chunking=Chunking())
        assert compiled.read_one(given) is not None
        for wrong in (
            {"log_decay": -given.log_decay},
            {"beta": given.beta[:, :1]},
            {"k": given.k.float()},
            {"q": given.q.clone().requires_grad_()},
            {"chunking": Chunking(size=0)},
            {"v": given.v[:, :5]},
            {"out": given.weights[:1]},
        ):
            assert compiled.read_one(given._replace(**wrong)) is None


@pytest.mark.parametrize("strongest", [-1e4, -torch.inf])
@fast
def test_what_follows_a_strong_decay_is_exact(implementation: str, strongest: float) -> None:
    """Logarithms of weak decays are not lost beside that of a strong one in the same chunk; a decay to
    nothing is nothing, and its gradient, too."""
    given = inputs("gated", 60)
    given["log_decay"] = given["log_decay"].clamp(max=-1e-5) / 100
    given["log_decay"][:, :, 3::20] = strongest
    found = []
    for dtype, each in ((torch.float64, "reference"), (torch.float32, implementation)):
        t = with_gradient({name: x.to(dtype) for name, x in given.items()})
        y, after = delta_rule(**t, implementation=each)
        (y.sum() + after.sum()).backward()
        found.append([y, after, *(x.grad for x in t.values())])
    for name, a, b in zip(("y", "weights", *given), found[1], found[0], strict=True):
        assert_same(a, b, 3e-6, name)


@pytest.mark.parametrize("width", [5, 16])
@pytest.mark.parametrize("length", [9, 32, 70])
@fast
def test_empty_memories_are_memories(implementation: str, length: int, width: int) -> None:
    """Of some heads, as after a reset: products with them may be left out, gradients may not."""
    given = inputs("gated", length, n_heads=4, width=width)
    given["weights"][0, 1:3] = 0
    given["weights"][1, 3] = 0
    for wanted in (given.keys(), given.keys() - {"weights"}):
        found = []
        for each in ("reference", implementation):
            t = {n: x.clone().requires_grad_(n in wanted) for n, x in given.items()}
            y, after = delta_rule(**t, implementation=each)
            (y.sin().sum() + after.sin().sum()).backward()
            found.append({"y": y, "after": after} | {n: t[n].grad for n in wanted})
        for name, expected in found[0].items():
            assert_same(found[1][name], expected, 1e-11, name)


@pytest.mark.parametrize("length", [1, 5, 40])
@pytest.mark.parametrize("rule", ["delta", "gated"])
@every
def test_the_memory_can_be_written_in_place(implementation: str, rule: str, length: int) -> None:
    t = inputs(rule, length)
    y, after = delta_rule(**t, implementation=implementation)
    transposed = torch.empty_like(after).mT.contiguous().mT
    for out in (torch.empty_like(after), transposed, t["weights"]):
        found, same = delta_rule(**t, implementation=implementation, out=out)
        assert same is out
        assert_all_same([found, out], [y, after], 0)


# ----- What does not fit


def test_the_compiled_loop_says_that_memory_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        forward = staticmethod(lambda *_: 0)

    monkeypatch.setattr(compiled.compiler, "functions", lambda *_: Full)
    with pytest.raises(MemspanError, match="memory is full: use a smaller batch"):
        delta_rule(**inputs("delta", 4), implementation="compiled")


def test_the_compiled_loop_is_refused_where_it_cannot_run() -> None:
    half = {name: x.half() for name, x in inputs("delta", 4).items()}
    with pytest.raises(MemspanError, match="needs a CPU"):
        delta_rule(**half, implementation="compiled")


def test_graphs_of_torch_compile_get_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs("delta", 5)
    expected = delta_rule(**given, implementation="chunked")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert_all_same(delta_rule(**given), expected, 0)
    with pytest.raises(MemspanError, match=r"torch\.compile.* use chunked"):
        delta_rule(**given, implementation="compiled")
