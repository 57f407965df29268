"""Arguments and results of fla's kernels. The kernels need a GPU and are not tested.

In their place are functions with the signatures of fla 0.5.2 and 0.6.0 that compute with our reference,
or token by token in the words of fla's own plain forms.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch import Tensor

from golden import assert_same
from memspan.errors import MemspanError
from memspan.models import DeltaProductConfig, GatedDeltaNetConfig
from memspan.models.registry import MODELS
from memspan.ops import generalized_delta_rule
from memspan.ops.fast_weights import fla, reference
from memspan.ops.fast_weights.rules import Chunking, RuleInputs, delta_rule, sum_rule

Calls = list[dict[str, Tensor]]


def by_reference(heads: list[Tensor], before: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and memory after ``heads``: queries, keys, values, beta and a decay if there is one."""
    q, k, v, beta, *decay = heads
    return reference.run(RuleInputs(q, k, v, beta, before, None, Chunking(), *decay))


def kernel(calls: Calls, decays: bool) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """One of fla's two functions, which lists what it was called with: nothing was converted."""

    def run(
        *,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        g: Tensor | None = None,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        assert q.dtype == k.dtype == v.dtype == torch.bfloat16
        assert q.shape == k.shape
        assert q.shape[:3] == v.shape[:3] == beta.shape
        assert initial_state is not None
        assert (g is not None) == decays
        assert g is None or (g.dtype, g.shape) == (torch.float32, v.shape[:3])
        assert initial_state.dtype == torch.float32
        calls.append({"q": q, "v": v})
        q = q * (k.shape[-1] ** -0.5 if scale is None else scale)
        heads = [t.float().transpose(1, 2) for t in (q, k, v, beta)]
        if g is not None:
            heads.append(g.transpose(1, 2))
        if cu_seqlens is None:
            read = [by_reference(heads, initial_state)]
        else:
            assert len(q) == 1
            assert cu_seqlens.dtype == torch.int64
            bounds = cu_seqlens.tolist()
            sequences = zip(pairwise(bounds), initial_state.split(1), strict=True)
            read = [by_reference([t[:, :, a:b] for t in heads], w) for (a, b), w in sequences]
        y = torch.cat([part for part, _ in read], 2)
        after = torch.cat([memory for _, memory in read])
        return y.transpose(1, 2).to(v.dtype), after if output_final_state else None

    return run


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Stand-ins for the kernels: the CPU stands for CUDA, and the package is there."""
    found: Calls = []
    for name in ("fla", "fla.ops", "fla.ops.delta_rule", "fla.ops.gated_delta_rule"):
        module = ModuleType(name)
        rule = name.removeprefix("fla.ops.")
        setattr(module, f"chunk_{rule}", kernel(found, "gated" in rule))
        monkeypatch.setitem(sys.modules, name, module)
    for name, module in fla.KERNELS.items():
        if name in ARGUMENTS:
            stand_in = sys.modules.get(module) or ModuleType(module)
            setattr(stand_in, name, token_by_token(name, found))
            monkeypatch.setitem(sys.modules, module, stand_in)
    monkeypatch.setattr(fla, "_installed", lambda: True)
    monkeypatch.setattr(fla, "DEVICE", "cpu")
    return found


ARGUMENTS = {
    "chunk_kda": {"q", "k", "v", "g", "beta"},
    "chunk_simple_gla": {"q", "k", "v", "g"},
    "chunk_gla": {"q", "k", "v", "g"},
    "chunk_dplr_delta_rule": {"q", "k", "v", "a", "b", "gk"},
}
"""Tensors ``[B, T, H, ...]`` of kernels; of a decay per head or per channel, whose other forms fla
has not, see :func:`token_by_token`."""
OF_CHANNELS = {"chunk_kda", "chunk_gla", "chunk_dplr_delta_rule"}


def token_by_token(name: str, calls: Calls) -> Callable[..., tuple[Tensor, Tensor]]:
    """One of fla's functions by its equation."""

    def run(
        *,
        scale: float,
        initial_state: Tensor,
        output_final_state: bool,
        cu_seqlens: Tensor | None = None,
        **given: Tensor,
    ) -> tuple[Tensor, Tensor]:
        assert given.keys() <= ARGUMENTS[name]
        assert given.keys() | {"g"} >= ARGUMENTS[name]
        assert {given[each].dtype for each in given.keys() & set("qkvab")} == {torch.bfloat16}
        assert initial_state.dtype == torch.float32
        assert output_final_state
        decay = given.get("g", given.get("gk"))
        if decay is not None:
            assert decay.dtype == torch.float32
            assert decay.shape == given["k"].shape[: 4 if name in OF_CHANNELS else 3]
        calls.append({"kernel": name, **given})  # type: ignore[dict-item]
        given = {each: t.float() for each, t in given.items()}
        given["q"] = given["q"] * scale
        n_tokens = given["q"].shape[1]
        if cu_seqlens is None:
            return tokens_of(given, initial_state)
        assert len(given["q"]) == 1
        assert cu_seqlens[-1] == n_tokens
        found = [
            tokens_of({each: t[:, a:b] for each, t in given.items()}, state)
            for (a, b), state in zip(
                pairwise(cu_seqlens.tolist()), initial_state.split(1), strict=True
            )
        ]
        return torch.cat([y for y, _ in found], 1), torch.cat([state for _, state in found])

    return run


def tokens_of(given: dict[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs ``[B, T, H, V]`` and the state after, ``[B, H, K, V]``."""
    decay = given.get("g", given.get("gk"))
    outputs = []
    for t in range(given["q"].shape[1]):
        k = given["k"][:, t]
        v = given["v"][:, t]
        before = state
        if decay is not None:
            factor = decay[:, t].exp()
            state = state * (factor if factor.dim() == 3 else factor[..., None])[..., None]
        if "beta" in given:
            v = given["beta"][:, t, :, None] * (v - torch.einsum("bhk,bhkv->bhv", k, state))
        if "a" in given:
            found = torch.einsum("bhk,bhkv->bhv", given["a"][:, t], before)
            state = state + given["b"][:, t, :, :, None] * found[:, :, None]
        state = state + k[..., None] * v[:, :, None]
        outputs.append(torch.einsum("bhk,bhkv->bhv", given["q"][:, t], state))
    return torch.stack(outputs, 1).bfloat16(), state


def tensors(decay: bool = True, key_heads: int = 2) -> dict[str, Tensor]:
    """Queries, keys and values in bfloat16, the rest in float32, from a memory that is not empty."""
    q, k = torch.randn(2, 3, key_heads, 7, 5).unbind()
    given = {
        "q": q.bfloat16(),
        "k": torch.nn.functional.normalize(k, dim=-1).bfloat16(),
        "v": torch.randn(3, 4, 7, 6).bfloat16(),
        "beta": torch.rand(3, 4, 7),
        "weights": torch.randn(3, 4, 5, 6),
    }
    return given | ({"log_decay": -torch.rand(3, 4, 7)} if decay else {})


def to_float32(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.float() for name, t in given.items()}


def some_starts() -> Tensor:
    """Documents that start at the first token, within a row, side by side and at the last."""
    starts = torch.zeros(3, 7, dtype=torch.bool)
    starts[0, [0, 3, 4]] = True
    starts[2, 6] = True
    return starts


@pytest.mark.parametrize("starts", [None, some_starts()], ids=["one", "documents"])
@pytest.mark.parametrize("key_heads", [2, 4])
@pytest.mark.parametrize("decay", [True, False])
def test_layouts_scale_and_memory(
    calls: Calls, decay: bool, key_heads: int, starts: Tensor | None
) -> None:
    """Outputs, the memory after and every gradient are those of the reference in float32."""
    given = tensors(decay, key_heads)
    sides = []
    for run in ("fla", "reference"):
        leaves = {name: t.clone().requires_grad_() for name, t in given.items()}
        own = leaves if run == "fla" else to_float32(leaves)
        y, after = delta_rule(**own, implementation=run, starts=starts)
        assert after.dtype == torch.float32
        total = y.float().sin().sum() + after.sin().sum()
        sides.append([y, after, *torch.autograd.grad(total, list(leaves.values()))])
    assert sides[0][0].dtype == torch.bfloat16
    for name, a, b in zip(("y", "after", *given), *sides, strict=True):
        # Our rounding of an output is all that differs.
        assert_same(a.float(), b.float(), 1e-6 if name == "after" else 2e-2, name)
    (call,) = calls
    # By token, then by head; documents of all rows in one.
    rows = (3, 7) if starts is None else (1, 21)
    assert call["q"].shape == (*rows, 4, 5)
    assert call["v"].shape == (*rows, 4, 6)


def test_a_spoilt_memory_does_not_reach_a_new_document(calls: Calls) -> None:
    given = tensors()
    given["weights"][0] = torch.nan
    y, after = delta_rule(**given, implementation="fla", starts=some_starts())
    assert y.isfinite().all()
    assert after.isfinite().all()


def test_it_is_never_chosen_by_itself(calls: Calls) -> None:
    """Nobody has measured it."""
    delta_rule(**tensors(), implementation="fla")
    delta_rule(**to_float32(tensors()))
    assert len(calls) == 1


Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def with_wide_keys(given: dict[str, Tensor]) -> dict[str, Tensor]:
    wide = {name: given[name].repeat(1, 1, 1, 64) for name in ("q", "k")}
    return given | wide | {"weights": torch.zeros(3, 4, 320, 6)}


@pytest.mark.parametrize(
    ("message", "change", "patch"),
    [
        ("bfloat16 with a memory in float32: choose precision bfloat16", to_float32, {}),
        ("memory in float32", lambda given: given | {"weights": given["weights"].bfloat16()}, {}),
        ("at most 256 features", with_wide_keys, {}),
        ("no sum rule: use chunked", lambda given: given | {"beta": None}, {}),
        ("needs flash-linear-attention: install it", dict, {"_installed": lambda: False}),
        ("needs CUDA: use compiled or chunked", dict, {"DEVICE": "cuda"}),
        ("compute capability 8.0 or more", dict, {"_capability": lambda like: (7, 5)}),
    ],
)
@pytest.mark.usefixtures("calls")
def test_unsupported_inputs_are_refused(
    message: str, change: Change, patch: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in patch.items():
        monkeypatch.setattr(fla, name, value)
    given = change(tensors(decay=False))
    rule = sum_rule if given["beta"] is None else delta_rule
    given = {name: t for name, t in given.items() if t is not None}
    with pytest.raises(MemspanError, match=f"the fla implementation .*{message}"):
        rule(**given, implementation="fla")


GENERAL = {
    "chunk_kda": ("channel", ("beta",)),
    "chunk_simple_gla": ("head", ()),
    "chunk_gla": ("channel", ()),
    "chunk_dplr_delta_rule": ("channel", ("erase", "lookup")),
}
"""Kernels, and the decay and tensors of the rule that call for them."""


@pytest.mark.parametrize("starts", [None, some_starts()], ids=["one", "documents"])
@pytest.mark.parametrize(
    ("kernel", "decay", "more"),
    [(kernel, *case) for kernel, case in GENERAL.items()]
    + [
        ("chunk_simple_gla", "none", ()),
        ("chunk_dplr_delta_rule", "head", ("erase", "lookup")),
        ("chunk_dplr_delta_rule", "none", ("erase", "lookup")),
    ],
)
def test_relatives_of_the_rule_get_their_kernels(
    calls: Calls, kernel: str, decay: str, more: tuple[str, ...], starts: Tensor | None
) -> None:
    """Outputs, the memory after and every gradient are those of the reference in float32."""
    given = tensors(decay=False, key_heads=4)
    beta = given.pop("beta")
    c = torch.nn.functional.normalize(torch.randn(3, 4, 7, 5), dim=-1)
    known = {"beta": beta, "lookup": c.bfloat16(), "erase": (beta[..., None] * c).bfloat16()}
    given |= {name: known[name] for name in more}
    if decay != "none":
        given["log_decay"] = -torch.rand(3, 4, 7, *([5] if decay == "channel" else []))
    rule = delta_rule if "beta" in more else generalized_delta_rule
    sides = []
    for run in ("fla", "reference"):
        leaves = {name: t.clone().requires_grad_() for name, t in given.items()}
        own = leaves if run == "fla" else to_float32(leaves)
        y, after = rule(**own, implementation=run, starts=starts)  # type: ignore[operator]
        total = y.float().sin().sum() + after.sin().sum()
        sides.append([y, after, *torch.autograd.grad(total, list(leaves.values()))])
    assert [call["kernel"] for call in calls] == [kernel]
    for name, a, b in zip(("y", "after", *given), *sides, strict=True):
        # Our rounding of an output is all that differs.
        assert_same(a.float(), b.float(), 1e-5 if name == "after" else 2e-2, name)


@pytest.mark.parametrize(
    ("architecture", "kernel"),
    [
        ("kda", "chunk_kda"),
        ("gla", "chunk_gla"),
        ("mamba-2", "chunk_simple_gla"),
        ("gated-delta-net-2", "chunk_dplr_delta_rule"),
        ("rwkv-7", "chunk_dplr_delta_rule"),
    ],
)
def test_models_hand_over_what_their_kernel_takes(
    calls: Calls, architecture: str, kernel: str
) -> None:
    backbone = MODELS[architecture](n_layers=2, d_model=16, n_heads=2).build()
    x = torch.randn(2, 9, 16)
    before = backbone(x).memory.detach()
    expected = backbone(x, before)
    with torch.autocast("cpu", torch.bfloat16):
        found = backbone(x, before, implementation="fla")
    assert [call["kernel"] for call in calls] == [kernel] * 2
    assert_same(found.hidden.float(), expected.hidden, 0.1, "hidden")
    assert_same(found.memory.weights, expected.memory.weights, 0.1, "weights")
    found.hidden.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in backbone.parameters())


def test_steps_of_delta_product_are_tokens_of_the_rule(calls: Calls) -> None:
    config = DeltaProductConfig(n_layers=1, d_model=16, n_heads=2, d_ff=8, n_householder=3)
    backbone = config.build()
    x = torch.randn(2, 9, 16)
    expected = backbone(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = backbone(x, implementation="fla")
    assert [call["q"].shape[1] for call in calls] == [27]
    assert_same(found.hidden.float(), expected.hidden, 0.1, "hidden")


def test_a_model_hands_over_what_autocast_computed(calls: Calls) -> None:
    """Products in bfloat16 are not converted; the memory is float32; results are near float32's."""
    config = GatedDeltaNetConfig(
        n_layers=2, d_model=16, n_heads=2, n_value_heads=4, d_value=4, d_ff=8
    )
    backbone = config.build()
    x = torch.randn(2, 9, 16)
    before = backbone(x).memory.detach()
    expected = backbone(x, before)
    with torch.autocast("cpu", torch.bfloat16):
        found = backbone(x, before, implementation="fla")
    assert len(calls) == 2
    assert {t.dtype for t in found.memory.tensors().values()} == {torch.float32, torch.int64}
    assert_same(found.hidden.float(), expected.hidden, 0.1, "hidden")
    assert_same(found.memory.weights, expected.memory.weights, 0.1, "weights")
    found.hidden.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in backbone.parameters())
