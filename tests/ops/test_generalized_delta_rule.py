"""The generalized delta rule: chunks and the loop in C against the loop, and cases of it elsewhere."""

from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from golden import Golden, assert_same, in_both_precisions, parameters
from memspan.errors import MemspanError
from memspan.ops import Chunking, delta_rule, generalized_delta_rule

Tensors = dict[str, Tensor]
DECAYS = ["none", "head", "channel"]
KINDS = [*product(DECAYS, ["erasing", "keeping"])]


def draw(kind: tuple[str, str], length: int, *, width: int = 5, values: int = 4) -> Tensors:
    """Inputs in float64, and a memory that is not empty; decays from almost none to very strong."""
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, 3, *shape, generator=generator, dtype=torch.float64)

    given = {"q": normal(length, width), "k": F.normalize(normal(length, width), dim=-1)}
    given |= {"v": normal(length, values), "weights": normal(width, values)}
    decay, erasing = kind
    if decay != "none":
        shape = (length, width) if decay == "channel" else (length,)
        given["log_decay"] = -(normal(*shape).abs() ** 4)
    if erasing == "erasing":
        given["lookup"] = F.normalize(normal(length, width), dim=-1)
        given["erase"] = normal(length, 1).sigmoid() * given["lookup"]
    return given


def results(
    given: Tensors, operation: Any = generalized_delta_rule, **options: Any
) -> list[Tensor]:
    """Outputs, memory, and gradients of all inputs."""
    leaves = {name: t.detach().requires_grad_() for name, t in given.items()}
    y, after = operation(**leaves, **options)
    loss = y.sin().sum() + after.cos().sum()
    return [y, after, *torch.autograd.grad(loss, list(leaves.values()))]


def assert_all_same(ours: list[Tensor], theirs: list[Tensor], tolerance: float) -> None:
    for n, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        assert_same(our, their, tolerance, f"result {n}")


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("length", [1, 31, 63, 100])
def test_chunks_equal_the_loop(kind: tuple[str, str], length: int) -> None:
    given = draw(kind, length)
    loop = results(given, implementation="reference")
    for size in (1, 7, 32):
        chunks = results(given, implementation="chunked", chunking=Chunking(size))
        assert_all_same(chunks, loop, 1e-11)


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("sizes", [(5, 4), (8, 16), (70, 9), (33, 68), (64, 1)])
@pytest.mark.parametrize("length", [1, 31, 32, 100])
def test_the_loop_in_C_equals_the_loop(
    kind: tuple[str, str], sizes: tuple[int, int], length: int
) -> None:
    width, values = sizes
    given = draw(kind, length, width=width, values=values)
    loop = results(given, implementation="reference")
    assert_all_same(results(given, implementation="compiled"), loop, 1e-11)
    single = results({n: t.float() for n, t in given.items()}, implementation="compiled")
    assert_all_same(single, loop, 1e-4)


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize(("implementation", "length"), [("chunked", 50), ("compiled", 300)])
def test_recomputing_gives_the_same_gradients(
    kind: tuple[str, str], implementation: str, length: int
) -> None:
    given = draw(kind, length)
    kept = results(given, implementation=implementation, chunking=Chunking(2))
    recomputed = results(given, implementation=implementation, chunking=Chunking(2, recompute=True))
    assert_all_same(recomputed, kept, 1e-12)


def test_the_loop_in_C_reads_views_and_gives_only_the_gradients_that_are_wanted() -> None:
    given = draw(("channel", "erasing"), 40)
    views = {n: t.transpose(1, 2).contiguous().transpose(1, 2) for n, t in given.items()}
    views["q"] = given["q"].mT.contiguous().mT
    views["v"] = given["v"][:, :1].expand_as(given["v"])
    given["v"] = views["v"].contiguous()
    assert_all_same(
        results(views, implementation="compiled"), results(given, implementation="compiled"), 1e-14
    )
    k = given["k"].requires_grad_()
    y, _ = generalized_delta_rule(**given, implementation="compiled")
    (alone,) = torch.autograd.grad(y.sin().sum(), [k])
    y, _ = generalized_delta_rule(**given, implementation="reference")
    assert_same(alone, torch.autograd.grad(y.sin().sum(), [k])[0], 1e-11, "k")


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("implementation", ["reference", "chunked", "compiled"])
def test_cuts_change_nothing(kind: tuple[str, str], implementation: str) -> None:
    given = draw(kind, 50)
    whole, end = generalized_delta_rule(**given, implementation=implementation)
    now = given.pop("weights")
    outputs = []
    for low, high in pairwise([0, 1, 2, 20, 50]):
        piece = {name: t[:, :, low:high] for name, t in given.items()}
        y, now = generalized_delta_rule(**piece, weights=now, implementation=implementation)
        outputs.append(y)
    assert_same(torch.cat(outputs, 2), whole, 1e-11, "outputs")
    assert_same(now, end, 1e-11, "memory")


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("implementation", ["reference", "chunked", "compiled"])
def test_documents_are_read_as_if_alone(kind: tuple[str, str], implementation: str) -> None:
    given = draw(kind, 50)
    given["weights"][1] = torch.nan
    starts = torch.zeros(2, 50, dtype=torch.bool)
    starts[0, [8, 31, 49]] = True
    starts[1, 0] = True
    together, end = generalized_delta_rule(**given, starts=starts, implementation=implementation)
    for row in range(2):
        edges = sorted({0, *starts[row].nonzero().flatten().tolist(), 50})
        for low, high in pairwise(edges):
            alone = {name: t[row : row + 1, :, low:high] for name, t in given.items()}
            alone["weights"] = given["weights"][row : row + 1]
            if starts[row, low]:
                alone["weights"] = torch.zeros_like(alone["weights"])
            y, after = generalized_delta_rule(**alone, implementation="reference")
            assert_same(together[row : row + 1, :, low:high], y, 1e-11, "outputs")
        assert_same(end[row : row + 1], after, 1e-11, "memory")


EXTREMES = torch.tensor([1 - 1e-6, 1e-6], dtype=torch.float64).log()


def extreme_decays(like: Tensor, which: str) -> Tensor:
    """Decays from 1 - 1e-6 to 1e-6: their logarithms."""
    weak, strong = EXTREMES
    share = torch.rand(like.shape, generator=torch.Generator().manual_seed(0), dtype=like.dtype)
    if which == "between":
        return -((-weak) ** share) * (-strong) ** (1 - share)
    return torch.where(share < {"weak": 1, "strong": 0, "both": 0.7}[which], weak, strong)


@pytest.mark.parametrize("which", ["weak", "strong", "both", "between"])
@pytest.mark.parametrize("rule", ["delta_rule", "keeping", "erasing"])
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_float32_keeps_every_gradient_beside_extreme_decays(
    decay: str, rule: str, which: str
) -> None:
    given = draw((decay, "keeping" if rule == "delta_rule" else rule), 70, width=32, values=32)
    given["log_decay"] = extreme_decays(given["log_decay"], which)
    operation: Any = generalized_delta_rule
    if rule == "delta_rule":
        operation = delta_rule
        given["beta"] = (
            2 * torch.rand(2, 3, 70, generator=torch.Generator().manual_seed(0)).double()
        )
    given = {name: t.float() for name, t in given.items()}
    exact = results(
        {n: t.double() for n, t in given.items()}, operation, implementation="reference"
    )
    for implementation in ("reference", "chunked", "compiled"):
        found = results(given, operation, implementation=implementation)
        for name, ours, theirs in zip(["y", "after", *given], found, exact, strict=True):
            error = (ours - theirs).norm() / theirs.norm()
            assert error <= 1e-4, f"{implementation}, {name}: {error:.1e}"


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_second_derivatives_equal_those_of_the_loop(kind: tuple[str, str]) -> None:
    given = draw(kind, 12)
    found = []
    for implementation in ("reference", "chunked"):
        leaves = {name: t.detach().requires_grad_() for name, t in given.items()}
        y, _ = generalized_delta_rule(**leaves, implementation=implementation, chunking=Chunking(5))
        inputs = list(leaves.values())
        first = torch.autograd.grad(y.sin().sum(), inputs, create_graph=True)
        penalty = sum((g * g).sum() for g in first)
        found.append(list(torch.autograd.grad(penalty, inputs)))
    assert_all_same(found[1], found[0], 1e-9)


@pytest.mark.parametrize("implementation", ["reference", "chunked", "compiled"])
def test_delta_rule_is_a_case(implementation: str) -> None:
    given = draw(("channel", "keeping"), 40)
    beta = torch.rand(2, 3, 40, dtype=torch.float64)
    ours = delta_rule(**given, beta=beta, implementation=implementation)
    erase = beta[..., None] * given["k"]
    given["v"] = beta[..., None] * given["v"]
    lookup = given["log_decay"].exp() * given["k"]
    theirs = generalized_delta_rule(**given, erase=erase, lookup=lookup, implementation="reference")
    assert_all_same([*ours], [*theirs], 1e-11)


def test_delta_rule_with_a_decay_per_feature_has_the_gradients_of_its_loop() -> None:
    given = draw(("channel", "keeping"), 40)
    given["beta"] = torch.rand(2, 3, 40, dtype=torch.float64)
    found = []
    for implementation in ("reference", "chunked", "compiled"):
        leaves = {name: t.detach().requires_grad_() for name, t in given.items()}
        y, after = delta_rule(**leaves, implementation=implementation, chunking=Chunking(16))
        loss = y.sin().sum() + after.cos().sum()
        found.append([y, after, *torch.autograd.grad(loss, list(leaves.values()))])
    assert_all_same(found[1], found[0], 1e-11)
    assert_all_same(found[2], found[0], 1e-11)


def test_delta_rule_with_a_decay_per_feature_shares_heads_of_keys() -> None:
    given = draw(("channel", "keeping"), 40)
    given |= {name: given[name][:, :1] for name in ("q", "k")}
    given["beta"] = torch.rand(2, 3, 40, dtype=torch.float64)
    found = []
    for implementation in ("reference", "compiled"):
        leaves = {name: t.detach().requires_grad_() for name, t in given.items()}
        y, after = delta_rule(**leaves, implementation=implementation)
        loss = y.sin().sum() + after.cos().sum()
        found.append([y, after, *torch.autograd.grad(loss, list(leaves.values()))])
    assert_all_same(found[1], found[0], 1e-11)


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("implementation", ["chunked", "compiled"])
def test_it_compiles_as_one_graph(kind: tuple[str, str], implementation: str) -> None:
    given = {name: t.requires_grad_() for name, t in draw(kind, 40).items()}
    torch._dynamo.reset()
    compiled = torch.compile(generalized_delta_rule, fullgraph=True, backend="aot_eager")
    y, after = compiled(**given, implementation=implementation)
    loss = y.sin().sum() + after.cos().sum()
    ours = [y, after, *torch.autograd.grad(loss, list(given.values()))]
    assert_all_same(ours, results(given), 1e-11)


def test_half_precision_is_computed_in_float32() -> None:
    given = {name: t.bfloat16() for name, t in draw(("channel", "erasing"), 40).items()}
    y, after = generalized_delta_rule(**given)
    exact, end = generalized_delta_rule(**{name: t.double() for name, t in given.items()})
    assert y.dtype == after.dtype == torch.bfloat16
    assert_same(y, exact, 1e-2, "outputs")
    assert_same(after, end, 1e-2, "memory")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lookup": None}, "erase and lookup go together: pass both, or neither"),
        ({"erase": torch.zeros(2, 3, 9, 4)}, r"erase must be like k, \[2, 3, 9, 5\]"),
        ({"log_decay": torch.ones(2, 3, 9)}, "log_decay must be at most 0, not 1"),
        ({"log_decay": torch.zeros(2, 3, 8)}, r"log_decay must be \[B, H, T\] or \[B, H, T, K\]"),
        ({"weights": torch.zeros(2, 3, 4, 4)}, r"the memory is \[2, 3, 4, 4\]"),
        ({"v": torch.zeros(2, 3, 8, 4)}, "queries, keys and values do not fit together"),
        ({"starts": torch.zeros(2, 9)}, "starts must be bool"),
        ({"chunking": Chunking(0)}, "the chunk size must be at least 1"),
        ({"implementation": "cuda"}, "there is no implementation 'cuda'"),
        ({"implementation": "fla"}, "the fla implementation needs CUDA: use compiled or chunked"),
    ],
)
def test_mistakes_are_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {n: t.float() for n, t in draw(("channel", "erasing"), 9).items()}
    with pytest.raises(MemspanError, match=message) as error:
        generalized_delta_rule(**given | change)
    assert "\n" not in str(error.value)


# ----- flash-linear-attention's plain recurrences, which scale queries


@pytest.mark.golden
@pytest.mark.parametrize("implementation", ["reference", "chunked", "compiled"])
@pytest.mark.parametrize("path", parameters("fla_generalized"))
def test_cases_equal_recorded_recurrences(path: Path, implementation: str) -> None:
    for g in in_both_precisions(path):
        check_case(g, implementation)


def check_case(g: Golden, implementation: str) -> None:
    names = [name for name, _ in g.named("in.")]
    leaves = {name: g.input(name) for name in names}
    for name, leaf in leaves.items():
        leaf.requires_grad_(not name.startswith("w_"))
    c = g.config
    options: dict[str, Any] = {"implementation": implementation, "chunking": Chunking(9)}
    empty = torch.zeros(c["B"], c["H"], c["K"], c["V"], dtype=g.dtype)
    options["weights"] = leaves.get("initial_state", empty)
    y, state = run_case(c["op"], leaves, leaves["q"] * c["K"] ** -0.5, c["householder"], options)
    g.check("o", y)
    terms = [y * leaves["w_o"]]
    if "w_state" in leaves:
        g.check("final_state", state)
        terms.append(state * leaves["w_state"])
    g.score("", *terms)
    g.backward()
    for name, leaf in leaves.items():
        if not name.startswith("w_"):
            assert leaf.grad is not None
            g.check(f"gradin.{name}", leaf.grad)


def run_case(
    name: str, x: Tensors, q: Tensor, householder: int, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The recurrence of this name as a case of ours."""
    k = x["k"]
    v = x["v"]
    if name == "gla":
        return generalized_delta_rule(q, k, v, log_decay=x["gk"], **options)
    if name == "simple_gla":
        return generalized_delta_rule(q, k, v, log_decay=x["g"], **options)
    if name == "retention":
        heads = torch.arange(q.shape[1], dtype=q.dtype)
        decay = (1 - 2.0 ** (-5 - heads)).log()
        decay = decay[:, None].expand(q.shape[:3])
        return generalized_delta_rule(q, k, v, log_decay=decay, **options)
    if name in ("gated_delta_rule", "kda"):
        return delta_rule(q, k, v, x["beta"], log_decay=x["g"], **options)
    if name == "gdn2":
        lookup = x["g"].exp() * x["b"] * k
        return generalized_delta_rule(
            q, k, x["w"] * v, log_decay=x["g"], erase=k, lookup=lookup, **options
        )
    if name in ("dplr", "iplr"):
        return generalized_delta_rule(
            q, k, v, log_decay=x.get("gk"), erase=-x["beta"], lookup=x["alpha"], **options
        )
    assert name == "delta_product"
    steps = torch.repeat_interleave(q, householder, 2)
    decay = torch.stack([x["g"], *[torch.zeros_like(x["g"])] * (householder - 1)], -1).flatten(2)
    y, state = delta_rule(steps, k, v, x["beta"], log_decay=decay, **options)
    return y[:, :, householder - 1 :: householder], state
