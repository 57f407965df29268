"""The delta rule against what others compute it with on a CPU, the same inputs, in float32.

    python benchmarks/delta_rule_peers.py [--seconds 0.05] [--rounds 3]

writes ``results/delta-rule.json``: how many times as much CPU time a side takes as ours (``compiled``,
the C), forward, forward and backward together, and for one token after a memory, with a decay and
without. Of one token, "in place" is ``compiled`` with ``out=weights``, and "reference" ours in PyTorch.
Nothing is measured unless outputs and gradients agree to 2e-5.

Sides, each where it has the rule; those whose packages are missing are left out with a line:

    chunked          ours in PyTorch
    torch.compile    the same in one graph of Inductor; compiling it is not in its time
    decay of 1       ours in C with a decay of 1 where there is none: chunks, not the loop over tokens
    transformers     its fallback for CPUs
    fla              flash-linear-attention's functions in PyTorch, which it calls naive
    attention-gym    its reference implementation, in chunks; a decay of 1 where there is none
    onnxruntime      the operator LinearAttention of opset 27: forward alone
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import timing
from memspan.ops.fast_weights.feature_maps import DPFP
from memspan.ops.fast_weights.rules import FeatureMap, delta_rule
from timing import interleaved, ratio

TOLERANCE = 2e-5
OURS = "compiled"
ONNX_OPSET = 27


@dataclass(frozen=True)
class Case:
    """Sizes, and the rule."""

    rows: int
    heads: int
    length: int
    width: int
    decay: bool
    feature_map: FeatureMap | None = None
    map_name: str = "none"

    @property
    def features(self) -> int:
        """Width of a key after the feature map."""
        return 2 * self.width if self.feature_map else self.width

    def label(self) -> dict[str, Any]:
        """As results files have it."""
        sizes = ("rows", "heads", "length", "width", "decay")
        return {name: getattr(self, name) for name in sizes} | {"map": self.map_name}


# Sizes S, M and H128 of Gated DeltaNet in throughput.py, and wider heads of one row.
WITH_DECAY = [
    Case(16, 4, 64, 32, True),
    Case(16, 8, 128, 32, True),
    Case(2, 4, 512, 128, True),
    Case(1, 32, 512, 64, True),
    Case(1, 16, 64, 128, True),
]
# T64, T256 and T1024 of Fast Weights with its map, then keys that are features already.
DPFP_CASES = [Case(16, 4, length, 32, False, DPFP(), "dpfp") for length in (64, 256, 1024)]
DENSE = [
    Case(16, 4, 64, 16, False),
    Case(16, 4, 64, 32, False),
    Case(16, 4, 256, 32, False),
    Case(16, 4, 256, 64, False),
    Case(2, 4, 512, 128, False),
]
CASES = WITH_DECAY + DPFP_CASES + DENSE


@dataclass(frozen=True)
class Inputs:
    """Tensors of a case, as projections have them: ``[B, T, H, K]``, strengths ``[B, T, H]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    decay: Tensor | None

    @classmethod
    def of(cls, case: Case) -> Inputs:
        """Random ones, keys and queries of length 1."""
        heads = (case.rows, case.length, case.heads)
        q, k, v = (torch.randn(*heads, case.width) for _ in range(3))
        return cls(
            F.normalize(q, dim=-1),
            F.normalize(k, dim=-1),
            v,
            torch.rand(heads),
            -F.softplus(torch.randn(heads)) if case.decay else None,
        )

    def tensors(self) -> list[Tensor]:
        """All there are."""
        given = (self.q, self.k, self.v, self.beta, self.decay)
        return [t for t in given if t is not None]

    def features(self, case: Case) -> Inputs:
        """The same for a side that knows no feature map."""
        if case.feature_map is None:
            return self
        return replace(self, q=case.feature_map(self.q), k=case.feature_map(self.k))


Rule = Callable[[Inputs], Tensor]
"""Outputs ``[B, T, H, V]`` from an empty memory."""


def ours(case: Case, implementation: str) -> Rule:
    before = torch.zeros(case.rows, case.heads, case.features, case.width)

    def run(given: Inputs) -> Tensor:
        q, k, v, beta, *decay = (t.transpose(1, 2) for t in given.tensors())
        y, _ = delta_rule(
            q,
            k,
            v,
            beta,
            before,
            log_decay=decay[0] if decay else None,
            feature_map=case.feature_map,
            implementation=implementation,
        )
        return y.transpose(1, 2)

    return run


def transformers_side(case: Case) -> Rule:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    assert case.decay
    root = case.width**0.5

    def run(given: Inputs) -> Tensor:
        y, _ = torch_chunk_gated_delta_rule(
            given.q * root, given.k, given.v, g=given.decay, beta=given.beta
        )
        return y

    return run


def fla_module(name: str) -> ModuleType:
    """``fla/ops/NAME/naive.py`` by itself: the package needs Triton, and this file does not."""
    package = importlib.util.find_spec("fla")
    if package is None or package.submodule_search_locations is None:
        raise ImportError("fla")
    path = Path(package.submodule_search_locations[0], "ops", name, "naive.py")
    spec = importlib.util.spec_from_file_location(f"fla_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fla_side(case: Case) -> Rule:
    root = case.features**0.5
    if case.decay:
        chunks = fla_module("gated_delta_rule").naive_chunk_gated_delta_rule

        def gated(given: Inputs) -> Tensor:
            return chunks(given.q, given.k, given.v, given.decay, given.beta, scale=1.0)[0]

        return gated
    plain = fla_module("delta_rule").delta_rule_chunkwise

    def run(given: Inputs) -> Tensor:
        q, k, v, beta = (t.transpose(1, 2) for t in given.features(case).tensors())
        return plain(q * root, k, v, beta)[0].transpose(1, 2)

    return run


def attention_gym(case: Case) -> Rule:
    from attn_gym.linear import chunk_gdn

    def run(given: Inputs) -> Tensor:
        given = given.features(case)
        decay = torch.zeros_like(given.beta) if given.decay is None else given.decay
        y, _ = chunk_gdn(given.q, given.k, given.v, decay, given.beta, scale=1.0, impl="reference")
        return y

    return run


def onnx_session(case: Case, memory: bool = False) -> Any:
    """A session of the operator alone, on one thread; with ``memory`` it reads on from one."""
    import onnxruntime
    from onnx import TensorProto, helper

    heads = case.heads
    sizes = {
        "query": [case.rows, case.length, heads * case.features],
        "key": [case.rows, case.length, heads * case.features],
        "value": [case.rows, case.length, heads * case.width],
        "past": [case.rows, heads, case.features, case.width],
        "decay": [case.rows, case.length, heads],
        "beta": [case.rows, case.length, heads],
    }
    left_out = ([] if memory else ["past"]) + ([] if case.decay else ["decay"])
    node = helper.make_node(
        "LinearAttention",
        ["" if name in left_out else name for name in sizes],
        ["output", "present"],
        q_num_heads=heads,
        kv_num_heads=heads,
        update_rule="gated_delta" if case.decay else "delta",
        scale=1.0,
    )

    def info(name: str, size: list[int]) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, size)

    graph = helper.make_graph(
        [node],
        "rule",
        [info(name, size) for name, size in sizes.items() if name not in left_out],
        [info("output", sizes["value"]), info("present", sizes["past"])],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", ONNX_OPSET)])
    made.ir_version = 10
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(made.SerializeToString(), options)


def onnx_runtime(case: Case) -> Rule:
    session = onnx_session(case)

    def run(given: Inputs) -> Tensor:
        return torch.from_numpy(session.run(["output"], onnx_feed(given.features(case)))[0]).view(
            given.v.shape
        )

    return run


def onnx_feed(given: Inputs) -> dict[str, Any]:
    """Heads beside one another; no copy."""
    named = {"query": given.q, "key": given.k, "value": given.v}
    feed = {name: t.detach().flatten(2).numpy() for name, t in named.items()}
    feed["beta"] = given.beta.detach().numpy()
    if given.decay is not None:
        feed["decay"] = given.decay.detach().numpy()
    return feed


def inductor(case: Case) -> Rule:
    torch._dynamo.reset()
    return torch.compile(ours(case, "chunked"), fullgraph=True, dynamic=False)


def decay_of_one(case: Case) -> Rule:
    rule = ours(case, OURS)

    def run(given: Inputs) -> Tensor:
        return rule(replace(given, decay=torch.zeros_like(given.beta)))

    return run


SIDES: dict[str, Callable[[Case], Rule]] = {
    OURS: lambda case: ours(case, "compiled"),
    "chunked": lambda case: ours(case, "chunked"),
    "torch.compile": inductor,
    "decay of 1": decay_of_one,
    "transformers": transformers_side,
    "fla": fla_side,
    "attention-gym": attention_gym,
    "onnxruntime": onnx_runtime,
}


def sides_of(case: Case, names: list[str]) -> dict[str, Rule]:
    """Sides that have the rule and can be imported."""
    found = {}
    for name in names:
        has_decay = {"transformers": True, "decay of 1": False}
        if has_decay.get(name, case.decay) != case.decay:
            continue
        try:
            found[name] = SIDES[name](case)
        except ImportError as missing:
            print(f"without {name}: {missing}")
    return found


def agree(results: dict[str, list[Tensor]]) -> None:
    """Stop unless all sides have the same as ours."""
    for name, result in results.items():
        for a, b in zip(result, results[OURS], strict=True):
            error = ((a - b).abs().max() / b.abs().max()).item()
            if not error <= TOLERANCE:
                raise SystemExit(f"{name} does not compute the same: off by {error:.1e}")


def many_tokens(case: Case, work: str, names: list[str]) -> dict[str, Callable[[], list[Tensor]]]:
    """Calls of every side: outputs, and in training the gradients of all inputs."""
    given = Inputs.of(case)
    training = work == "training"
    for t in given.tensors():
        t.requires_grad_(training)
    upstream = torch.randn(given.v.shape)

    def call(rule: Rule) -> list[Tensor]:
        if not training:
            with torch.no_grad():
                return [rule(given)]
        y = rule(given)
        return [y.detach(), *torch.autograd.grad(y, given.tensors(), upstream)]

    named = [name for name in names if not (training and name == "onnxruntime")]
    return {name: lambda rule=rule: call(rule) for name, rule in sides_of(case, named).items()}


def one_token(case: Case) -> dict[str, Callable[[], list[Tensor]]]:
    """Calls of those that read on from a memory."""
    given = Inputs.of(case)
    before = torch.randn(case.rows, case.heads, case.features, case.width)
    own = before.clone()
    # [B, 1, H, K] is [B, H, 1, K] as well: each side has its own layout.
    q, k, v, beta, *decay = (t.transpose(1, 2) for t in given.tensors())
    log_decay = decay[0] if decay else None

    @torch.no_grad()
    def read(memory: Tensor, **options: Any) -> list[Tensor]:
        y, after = delta_rule(
            q, k, v, beta, memory, log_decay=log_decay, feature_map=case.feature_map, **options
        )
        return [y.transpose(1, 2), after]

    calls = {
        OURS: lambda: read(before),
        "in place": lambda: read(own, out=own),
        "reference": lambda: read(before, implementation="reference"),
    }
    if case.decay:
        from transformers.models.qwen3_next.modeling_qwen3_next import (
            torch_recurrent_gated_delta_rule,
        )

        root = case.width**0.5

        @torch.no_grad()
        def fallback() -> list[Tensor]:
            y, after = torch_recurrent_gated_delta_rule(
                given.q * root,
                given.k,
                given.v,
                g=given.decay,
                beta=given.beta,
                initial_state=before,
                output_final_state=True,
            )
            return [y, after]

        calls["transformers"] = fallback
    try:
        session = onnx_session(case, memory=True)
    except ImportError as missing:
        print(f"without onnxruntime: {missing}")
        return calls

    def run() -> list[Tensor]:
        feed = onnx_feed(given.features(case)) | {"past": before.numpy()}
        y, after = session.run(None, feed)
        return [torch.from_numpy(y).view(given.v.shape), torch.from_numpy(after)]

    return calls | {"onnxruntime": run}


def measure(case: Case, work: str, names: list[str], options: Any) -> list[dict[str, Any]]:
    """Rows of one case and work."""
    calls = one_token(case) if work == "one token" else many_tokens(case, work, names)
    agree({name: [t.clone() for t in call()] for name, call in calls.items()})
    times = interleaved(calls, options.rounds, options.seconds)
    rows = []
    for name, seconds in times.items():
        row = {"work": work} | case.label() | {"side": name}
        row["milliseconds"] = round(1000 * median(seconds), 4)
        row |= ratio(seconds, times[OURS]).row(2)
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    parser = timing.parser(__doc__, rounds=3, results="delta-rule.json")
    parser.add_argument(
        "--seconds", type=float, default=0.05, help="of a side's turn (%(default)s)"
    )
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), metavar="SIDE")
    options = parser.parse_args()
    names = [OURS, *(name for name in options.sides if name != OURS)]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    for case in CASES:
        for work in ("forward", "training"):
            rows += measure(case, work, names, options)
    for case in (
        Case(1, 32, 1, 64, True),
        Case(1, 16, 1, 128, True),
        Case(16, 4, 1, 32, False, DPFP(), "dpfp"),
        Case(1, 32, 1, 64, False),
    ):
        rows += measure(case, "one token", names, options)
    timing.write(options.json, rows)


if __name__ == "__main__":
    main()
