"""Today's recurrences against what others compute them with on a CPU, in float32.

    python benchmarks/recurrences.py [--seconds 0.1] [--rounds 3]

writes ``results/recurrences.json``: how many times as much CPU time a side takes as ours does, for a
segment forward and backward, and for one token after a memory.

``rule``: the operation alone, the same inputs for all. Sides, each where it has the rule: ``chunked``,
ours in PyTorch; flash-linear-attention's functions in PyTorch, which it calls naive: ``fla loop``
and ``fla chunks``; and in training ``attention-gym``, its reference implementation, in chunks. With
``--compile``, ``torch.compile`` of ours in PyTorch; compiling it is not in its time. Nothing is
measured unless outputs and gradients agree to 1e-4.

``layer``: a layer of transformers, as it runs without its kernels, against ours of the same sizes;
they compute the same (``tests/integrations/test_matrix_layers.py``). One token of ours is read by the
reader of a stack of one layer, which has norms and, for KDA, a feed-forward sub-layer of width 1
besides.

It needs the packages attn-gym and einops, and flash-linear-attention's ``fla-core``, unpacked, on the
path. That need not run, which would need Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import timing
from delta_rule_peers import fla_module
from memspan import layers, models
from memspan.ops import delta_rule, generalized_delta_rule
from timing import interleaved, ratio

TOLERANCE = 1e-4
ROWS = 4
HEADS = 4
LENGTH = 256
OURS = "ours"
Tensors = dict[str, Tensor]
Rule = Callable[[Tensors], Tensor]


@dataclass(frozen=True)
class Case:
    """A rule: its strengths, and how each side computes it. Tensors are ``[B, H, T, ...]``."""

    strengths: tuple[str, ...]
    """Besides queries, keys and values: ``head`` and ``channel`` (logarithms of decays), ``beta``,
    ``erase_gate`` and ``write_gate``, ``lookup``."""
    ours: Callable[..., tuple[Tensor, Tensor]]
    """A function of the inputs, the memory as ``weights``, and an implementation."""
    theirs: dict[str, Callable[[Tensors, Tensor], Tensor]]
    """By side; of the inputs and the memory."""
    writes: int = 1
    """Writes of a token."""


def swapped(function: Callable[..., Any], **renamed: str) -> Callable[[Tensors, Tensor], Tensor]:
    """A function of ``[B, T, H, ...]`` that takes queries times the root of their width."""

    def run(x: Tensors, before: Tensor) -> Tensor:
        named = {name: x[ours].transpose(1, 2) for name, ours in renamed.items()}
        y, _ = function(**named, initial_state=before.clone(), output_final_state=True)
        return y.transpose(1, 2)

    return lambda x, before: run(x | {"q": x["q"] * x["q"].shape[-1] ** 0.5}, before)


def plain(strength: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Ours, with this decay alone."""
    return lambda x, **rest: generalized_delta_rule(
        x["q"], x["k"], x["v"], log_decay=x[strength], **rest
    )


def replacing(strength: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Our delta rule with this decay."""
    return lambda x, **rest: delta_rule(
        x["q"], x["k"], x["v"], x["beta"], log_decay=x[strength], **rest
    )


def gated_twice(x: Tensors, **rest: Any) -> tuple[Tensor, Tensor]:
    """Gated DeltaNet 2."""
    lookup = x["channel"].exp() * x["erase_gate"] * x["k"]
    return generalized_delta_rule(
        x["q"],
        x["k"],
        x["write_gate"] * x["v"],
        log_decay=x["channel"],
        erase=x["k"],
        lookup=lookup,
        **rest,
    )


def removing(x: Tensors, **rest: Any) -> tuple[Tensor, Tensor]:
    """RWKV-7's rule."""
    erase = 0.9 * x["lookup"]
    return generalized_delta_rule(
        x["q"], x["k"], x["v"], log_decay=x["channel"], erase=erase, lookup=x["lookup"], **rest
    )


def stepping(x: Tensors, **rest: Any) -> tuple[Tensor, Tensor]:
    """DeltaProduct of two steps."""
    decay = F.pad(x["head"].unsqueeze(-1), (0, 1)).flatten(-2)
    q = x["q"].repeat_interleave(2, 2)
    y, after = delta_rule(q, x["k"], x["v"], x["beta"], log_decay=decay, **rest)
    return y[:, :, 1::2], after


def heads_first(function: Callable[..., Any]) -> Callable[[Tensors, Tensor], Tensor]:
    """fla's function for RWKV-7's rule."""

    def run(x: Tensors, before: Tensor) -> Tensor:
        q = x["q"] * x["q"].shape[-1] ** 0.5
        beta = -0.9 * x["lookup"]
        y, _ = function(q, x["k"], x["v"], x["lookup"], beta, x["channel"], before)
        return y  # type: ignore[no-any-return]

    return run


def gym(function: Callable[..., Any], decay: str) -> Callable[[Tensors, Tensor], Tensor]:
    """attention-gym's function of ``[B, T, H, ...]`` and a memory ``[B, H, V, K]``."""

    def run(x: Tensors, before: Tensor) -> Tensor:
        given = [x[name].transpose(1, 2) for name in ("q", "k", "v", decay, "beta")]
        y, _ = function(*given, before.mT.contiguous(), scale=1.0, impl="reference")
        return y.transpose(1, 2)  # type: ignore[no-any-return]

    return run


def cases() -> dict[str, Case]:
    from attn_gym.linear import chunk_gdn, chunk_kda

    simple = fla_module("simple_gla")
    gated = fla_module("gated_delta_rule")
    kda = fla_module("kda")
    twice = fla_module("gdn2")
    product = fla_module("gated_delta_product")
    dplr = fla_module("generalized_delta_rule/dplr")
    alike = {"q": "q", "k": "k", "v": "v"}
    per_head = alike | {"g": "head"}
    delta = {"g": "channel", "beta": "beta"}
    double = alike | {"g": "channel", "b": "erase_gate", "w": "write_gate"}

    def steps(x: Tensors, before: Tensor) -> Tensor:
        named = {n: x[o].transpose(1, 2) for n, o in (per_head | {"beta": "beta"}).items()}
        y, _ = product.naive_recurrent_gated_delta_product(
            **named, scale=1.0, initial_state=before, output_final_state=True, num_householder=2
        )
        return y.transpose(1, 2)  # type: ignore[no-any-return]

    return {
        "retnet, mamba-2": Case(
            ("head",),
            plain("head"),
            {
                "fla loop": swapped(simple.naive_recurrent_simple_gla, **per_head),
                "fla chunks": swapped(simple.naive_chunk_simple_gla, **per_head),
            },
        ),
        "gla": Case(
            ("channel",),
            plain("channel"),
            {
                "fla loop": swapped(
                    fla_module("gla").naive_recurrent_gla, **alike | {"gk": "channel"}
                )
            },
        ),
        "gated-delta-net": Case(
            ("head", "beta"),
            replacing("head"),
            {
                "fla loop": swapped(
                    gated.naive_recurrent_gated_delta_rule, **per_head | {"beta": "beta"}
                ),
                "fla chunks": swapped(
                    gated.naive_chunk_gated_delta_rule, **per_head | {"beta": "beta"}
                ),
                "attention-gym": gym(chunk_gdn, "head"),
            },
        ),
        "kda": Case(
            ("channel", "beta"),
            replacing("channel"),
            {
                "fla loop": swapped(kda.naive_recurrent_kda, **alike | delta),
                "fla chunks": swapped(kda.naive_chunk_kda, **alike | delta),
                "attention-gym": gym(chunk_kda, "channel"),
            },
        ),
        "gated-delta-net-2": Case(
            ("channel", "erase_gate", "write_gate"),
            gated_twice,
            {
                "fla loop": swapped(twice.naive_recurrent_gdn2, **double),
                "fla chunks": swapped(twice.naive_chunk_gdn2, **double),
            },
        ),
        "delta-product": Case(("head", "beta"), stepping, {"fla loop": steps}, writes=2),
        "rwkv-7": Case(
            ("channel", "lookup"),
            removing,
            {
                "fla loop": heads_first(dplr.dplr_recurrence),
                "fla chunks": heads_first(dplr.dplr_chunkwise),
            },
        ),
    }


def draw(case: Case, length: int, width: int) -> Tensors:
    """Inputs: keys of length 1, decays between e^-.2 and 1."""

    def normal(tokens: int, *shape: int) -> Tensor:
        return torch.randn(ROWS, HEADS, tokens, *shape)

    written = length * case.writes
    every = {
        "q": normal(length, width),
        "k": F.normalize(normal(written, width), dim=-1),
        "v": normal(written, width),
        "head": -0.2 * torch.rand(ROWS, HEADS, length),
        "channel": -0.2 * torch.rand(ROWS, HEADS, length, width),
        "beta": torch.rand(ROWS, HEADS, written),
        "erase_gate": torch.rand(ROWS, HEADS, length, width),
        "write_gate": torch.rand(ROWS, HEADS, length, width),
        "lookup": F.normalize(normal(length, width), dim=-1),
    }
    return {name: every[name] for name in ("q", "k", "v", *case.strengths)}


def agree(results: dict[str, list[Tensor]]) -> None:
    """Stop unless all sides have the same as ours."""
    for name, result in results.items():
        for a, b in zip(result, results[OURS], strict=True):
            error = ((a - b).norm() / b.norm()).item()
            if not error <= TOLERANCE:
                raise SystemExit(f"{name} does not compute the same: off by {error:.1e}")


def rule_calls(
    case: Case, work: str, width: int, compiles: bool
) -> dict[str, Callable[[], list[Tensor]]]:
    """Calls of every side: outputs, and in training the gradients of all inputs."""
    training = work == "training"
    given = draw(case, LENGTH if training else 1, width)
    before = 0.1 * torch.randn(ROWS, HEADS, width, width)
    leaves = [t.requires_grad_(training) for t in given.values()]
    upstream = torch.randn(ROWS, HEADS, LENGTH if training else 1, width)

    def call(rule: Rule) -> list[Tensor]:
        if not training:
            with torch.no_grad():
                return [rule(given)]
        y = rule(given)
        return [y.detach(), *torch.autograd.grad(y, leaves, upstream)]

    def ours(implementation: str | None) -> Rule:
        return lambda x: case.ours(x, weights=before, implementation=implementation)[0]

    rules: dict[str, Rule] = {OURS: ours(None)}
    if training:
        rules["chunked"] = ours("chunked")
        if compiles:
            torch._dynamo.reset()
            rules["torch.compile"] = torch.compile(ours("chunked"), fullgraph=True)
    for name, function in case.theirs.items():
        if training or name == "fla loop":
            rules[name] = lambda x, function=function: function(x, before)
    return {name: lambda rule=rule: call(rule) for name, rule in rules.items()}


def mamba_2_layers(width: int) -> tuple[Any, Any, Any, Any]:
    """A layer of transformers, what its cache is made from, our layer, and a stack of it."""
    from transformers.models.mamba2 import modeling_mamba2 as theirs

    sizes = {"num_heads": HEADS, "head_dim": width, "n_groups": 1, "state_size": width, "expand": 2}
    d_model = HEADS * width // 2
    config = theirs.Mamba2Config(hidden_size=d_model, num_hidden_layers=1, **sizes)
    options = models.Mamba2Config(d_model=d_model, n_layers=1, n_heads=HEADS, d_state=width)
    return theirs.Mamba2Mixer(config, 0), config, layers.Mamba2Mixer(options), options.build()


def kda_layers(width: int) -> tuple[Any, Any, Any, Any]:
    """As :func:`mamba_2_layers`."""
    from transformers.models.kimi_linear import modeling_kimi_linear as theirs

    d_model = HEADS * width
    config = theirs.KimiLinearConfig(
        hidden_size=d_model,
        linear_num_heads=HEADS,
        linear_head_dim=width,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    )
    options = models.KDAConfig(d_model=d_model, n_layers=1, n_heads=HEADS, d_ff=1)
    own = layers.KimiDeltaAttention(options)
    return theirs.KimiLinearDeltaAttention(config, 0), config, own, options.build()


LAYERS = {"mamba-2": mamba_2_layers, "kda": kda_layers}


def layer_calls(name: str, work: str, width: int) -> dict[str, Callable[[], object]]:
    from transformers.cache_utils import DynamicCache

    theirs, config, ours, stack = LAYERS[name](width)
    d_model = stack.config.d_model
    if work == "training":
        x = torch.randn(ROWS, LENGTH, d_model, requires_grad=True)

        def train(layer: Any, output: Callable[[Any], Tensor]) -> list[Any]:
            leaves = [x, *layer.parameters()]
            loss = output(layer(x)).square().sum()
            return list(torch.autograd.grad(loss, leaves, allow_unused=True))

        return {
            OURS: lambda: train(ours, lambda found: found[0]),
            "transformers": lambda: train(theirs, lambda found: found),
        }
    token = torch.randn(ROWS, 1, d_model)
    cache = DynamicCache(config=config)
    reader = stack.eval().reader(None, ROWS)
    with torch.no_grad():
        theirs(token.expand(ROWS, 8, d_model), cache=cache)

    @torch.no_grad()
    def read() -> object:
        return theirs(token, cache=cache)

    return {OURS: lambda: reader.read(token), "transformers": read}


def rows_of(
    calls: dict[str, Callable[[], Any]], options: Any, label: dict[str, Any]
) -> list[dict[str, Any]]:
    times = interleaved(calls, options.rounds, options.seconds)
    rows = []
    for name, seconds in times.items():
        row = label | {"side": name, "milliseconds": round(1000 * median(seconds), 4)}
        rows.append(row | ratio(seconds, times[OURS]).row(2))
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = timing.parser(__doc__, rounds=3, results="recurrences.json")
    parser.add_argument("--seconds", type=float, default=0.1, help="of a side's turn (%(default)s)")
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 64], help="of heads")
    parser.add_argument("--compile", action="store_true", help="also torch.compile of our chunks")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    for width in options.widths:
        for name, case in cases().items():
            for work in ("training", "one token"):
                calls = rule_calls(case, work, width, options.compile)
                agree({side: [t.clone() for t in call()] for side, call in calls.items()})
                label = {"what": "rule", "name": name, "work": work, "width": width}
                rows += rows_of(calls, options, label)
        for name in LAYERS:
            for work in ("training", "one token"):
                label = {"what": "layer", "name": name, "work": work, "width": width}
                rows += rows_of(layer_calls(name, work, width), options, label)
    timing.write(options.json, rows)


if __name__ == "__main__":
    main()
