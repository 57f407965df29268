"""The loops in C as operators: as ``torch.compile`` expects them, and found in its graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.library import opcheck

from golden import assert_same
from memspan.errors import MemspanError
from memspan.models.feedback.config import FeedbackConfig
from memspan.models.feedback.model import Feedback
from memspan.ops.fast_weights import compiled
from memspan.ops.fast_weights.feature_maps import DPFP, elu_plus_one
from memspan.ops.fast_weights.rules import delta_rule, sum_rule
from memspan.ops.feedback import recurrence

# Tracing warns of what is not ours. One worker imports the compiler.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.xdist_group("compiled"),
    pytest.mark.skipif(not compiled.available(torch.zeros(())), reason="no loops in C"),
]

ROWS = 2
LENGTH = 70
"""More tokens than there are between two saved memories."""


def tensors(*strengths: str, key_heads: int = 2, features: int = 3) -> dict[str, Tensor]:
    """Inputs of a rule with these strengths; the features of its memory are those of DPFP, or its keys'
    own with a decay."""
    torch.manual_seed(0)
    width = features if "log_decay" in strengths else features // 2
    found = {
        "q": torch.randn(ROWS, key_heads, LENGTH, width),
        "k": torch.randn(ROWS, key_heads, LENGTH, width) / width**0.5,
        "v": torch.randn(ROWS, 2, LENGTH, 4),
        "weights": torch.randn(ROWS, 2, features, 4),
    }
    if "beta" in strengths:
        found["beta"] = torch.rand(ROWS, 2, LENGTH)
    if "log_decay" in strengths:
        found["log_decay"] = -torch.rand(ROWS, 2, LENGTH)
    return {name: t.double().requires_grad_() for name, t in found.items()}


STARTS = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
STARTS[0, 40] = True
RULES: dict[str, tuple[tuple[str, ...], int, dict[str, Any]]] = {
    "delta": (("beta",), 2, {"feature_map": DPFP(1), "starts": STARTS}),
    "dense": (("beta", "log_decay"), 2, {"feature_map": elu_plus_one}),
    "decay": (("beta", "log_decay"), 1, {"starts": STARTS}),
    "sum": ((), 2, {"feature_map": DPFP(1)}),
}


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("rule", RULES)
def test_the_rules_are_an_operator(rule: str, saves: bool) -> None:
    strengths, key_heads, options = RULES[rule]
    given = list(tensors(*strengths, key_heads=key_heads, features=6).values())
    decays = len(given) == 6
    if not saves:
        given = [t.detach() for t in given]
    starts = None if decays else options.get("starts")
    nu = 0 if decays else 1
    opcheck(
        torch.ops.memspan.fast_weights_rule.default,
        (given, starts, nu, None if decays else 1e-6, 32, saves),
    )


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("names", [["log_decay"], ["erase", "lookup"], ["log_decay", "beta"]])
def test_the_generalized_rule_is_an_operator(names: list[str], saves: bool) -> None:
    given = tensors("beta", "log_decay", features=6)
    given |= {"erase": given["k"] * 0.5, "lookup": given["k"].sin()}
    leaves = {name: t.detach().requires_grad_(saves) for name, t in given.items()}
    wanted = ["log_decay", "erase", "lookup", "beta"]
    strengths = [leaves[name] if name in names else None for name in wanted]
    opcheck(
        torch.ops.memspan.generalized_delta_rule.default,
        (*(leaves[name] for name in ("q", "k", "v", "weights")), *strengths, 32, saves),
    )


def test_feedbacks_loop_is_an_operator() -> None:
    torch.manual_seed(0)
    config = FeedbackConfig(d_model=8, n_layers=2, n_heads=2, memory_length=3)
    backbone = Feedback(config).double()
    seen: list[Any] = []
    operation = recurrence._operation

    def note(*given: Any) -> Any:
        seen.append(given)
        return operation(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrence, "_operation", note)
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        backbone(torch.randn(ROWS, 4, 8, dtype=torch.float64))
    ((given, *rest),) = seen
    leaves = [t.detach().requires_grad_() for t in given]
    opcheck(torch.ops.memspan.feedback_recurrence.default, (leaves, *rest))


@pytest.mark.parametrize("rule", RULES)
def test_a_graph_calls_the_loops_and_gives_their_numbers(rule: str) -> None:
    strengths, key_heads, options = RULES[rule]
    given = tensors(*strengths, key_heads=key_heads, features=6)
    function = delta_rule if "beta" in given else sum_rule
    graphs: list[GraphModule] = []

    def keep(graph: GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def numbers(run: Any) -> list[Tensor]:
        y, after = run(**given, **options)
        return [y, after, *torch.autograd.grad(y.square().sum() + after.sum(), [*given.values()])]

    torch._dynamo.reset()
    found = numbers(torch.compile(function, fullgraph=True, backend=keep))
    (graph,) = graphs
    assert "memspan.fast_weights_rule" in graph.code
    for ours, theirs in zip(found, numbers(function), strict=True):
        assert_same(ours, theirs, 1e-12, "numbers")


def test_an_exported_graph_needs_no_operator_of_ours_unless_asked() -> None:
    given = {name: t.detach() for name, t in tensors("beta", features=6).items()}

    class Rule(torch.nn.Module):
        def __init__(self, implementation: str | None) -> None:
            super().__init__()
            self.implementation = implementation

        def forward(self, **given: Tensor) -> tuple[Tensor, Tensor]:
            return delta_rule(**given, feature_map=DPFP(1), implementation=self.implementation)

    def code(program: torch.export.ExportedProgram) -> str:
        parts = program.graph_module.modules()
        return "".join(part.code for part in parts if isinstance(part, GraphModule))

    plain = torch.export.export(Rule(None), (), given)
    assert "solve_triangular" in code(plain)
    assert "memspan" not in code(plain)
    ours = torch.export.export(Rule("compiled"), (), given)
    assert "memspan" in code(ours)
    for program in (plain, ours):
        for found, expected in zip(program.module()(**given), Rule(None)(**given), strict=True):
            assert_same(found, expected, 1e-12, "numbers")


def test_a_graph_in_half_precision_gets_chunks() -> None:
    given = {name: t.detach().bfloat16() for name, t in tensors("beta", features=6).items()}
    torch._dynamo.reset()
    read = torch.compile(delta_rule, fullgraph=True, backend="eager")
    expected = delta_rule(**given, feature_map=DPFP(1), implementation="chunked")
    for ours, theirs in zip(read(**given, feature_map=DPFP(1)), expected, strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(MemspanError, match="needs a CPU, float32 or float64"):
        delta_rule(**given, feature_map=DPFP(1), implementation="compiled")
