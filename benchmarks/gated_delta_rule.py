"""The gated delta rule against transformers' fallback for CPUs, the same inputs, in float32.

    python benchmarks/gated_delta_rule.py [--seconds 0.3] [--rounds 9]

writes ``results/gated-delta-rule.json``: for forward and backward together, and for one token after a
memory, into a new one and in place, the ratio of CPU time. Needs transformers. Nothing is measured
unless outputs, gradients and memories agree to 2e-5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

import timing
from memspan.ops.fast_weights.rules import delta_rule
from timing import interleaved, ratio

WIDTH = 2048
"""Of all heads together."""
Result = tuple[Tensor, Tensor]


def inputs(length: int, width: int) -> dict[str, Tensor]:
    """Queries, keys, values ``[1, T, H, K]``, beta and the logarithm of the decay ``[1, T, H]``."""
    heads = (1, length, WIDTH // width)
    q, k, v = (torch.randn(*heads, width) for _ in range(3))
    beta = torch.rand(heads)
    decay = -F.softplus(torch.randn(heads))
    return {"query": F.normalize(q, dim=-1), "key": F.normalize(k, dim=-1), "value": v} | {
        "beta": beta,
        "g": decay,
    }


def ours(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    g: Tensor,
    state: Tensor,
    out: Tensor | None = None,
) -> Result:
    q, k, v, beta, g = (
        t.transpose(1, 2) for t in (query * key.shape[-1] ** -0.5, key, value, beta, g)
    )
    y, after = delta_rule(q, k, v, beta, state, log_decay=g, out=out)
    return y.transpose(1, 2), after


def theirs(function: Callable[..., Any], state: Tensor, **given: Tensor) -> Result:
    y, state = function(**given, initial_state=state, output_final_state=True)
    return y, state


def agree(sides: dict[str, list[Tensor]]) -> None:
    *others, last = sides.values()
    for a, b in ((a, b) for side in others for a, b in zip(side, last, strict=True)):
        error = (a.flatten() - b.flatten()).abs().max() / b.abs().max()
        if not error <= 2e-5:
            raise SystemExit(f"the two sides do not compute the same: off by {error:.1e}")


def training(length: int, width: int) -> dict[str, Callable[[], list[Tensor]]]:
    given = {name: t.requires_grad_() for name, t in inputs(length, width).items()}
    state = torch.zeros(1, WIDTH // width, width, width)
    upstream = torch.randn(1, length, WIDTH // width, width)

    def step(function: Callable[..., Result]) -> list[Tensor]:
        y, _ = function(**given, state=state)
        return [y, *torch.autograd.grad(y, list(given.values()), upstream)]

    return {
        "memspan": lambda: step(ours),
        "transformers": lambda: step(lambda **t: theirs(torch_chunk_gated_delta_rule, **t)),
    }


def one_token(width: int) -> dict[str, Callable[[], list[Tensor]]]:
    given = inputs(1, width)
    given["state"] = torch.randn(1, WIDTH // width, width, width)

    own = given["state"].clone()
    scale = width**-0.5
    # Of one token [1, 1, H, K] is [1, H, 1, K], too: each side has its own layout.
    q, k, v, beta, g = (
        given[name].transpose(1, 2) for name in ("query", "key", "value", "beta", "g")
    )

    @torch.no_grad()
    def new() -> list[Tensor]:
        return [*delta_rule(q * scale, k, v, beta, given["state"], log_decay=g)]

    @torch.no_grad()
    def in_place() -> list[Tensor]:
        return [*delta_rule(q * scale, k, v, beta, own, log_decay=g, out=own)]

    @torch.no_grad()
    def fallback() -> list[Tensor]:
        return [*theirs(torch_recurrent_gated_delta_rule, **given)]

    return {"memspan": new, "in place": in_place, "transformers": fallback}


def main() -> None:
    parser = timing.parser(__doc__, rounds=9, results="gated-delta-rule.json")
    parser.add_argument("--seconds", type=float, default=0.3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    for work, length, width in (
        *(("training", length, width) for length in (512, 64) for width in (64, 128)),
        *(("one token", 1, width) for width in (64, 128)),
    ):
        sides = training(length, width) if work == "training" else one_token(width)
        agree({name: run() for name, run in sides.items()})
        times = interleaved(sides, options.rounds, options.seconds)
        for name in [name for name in sides if name != "transformers"]:
            kind = work if name == "memspan" else f"{work} {name}"
            found = ratio(times["transformers"], times[name])
            rows.append({"work": kind, "tokens": length, "head": width, "ratio": vars(found)})
            spread = f"{found.middle:.2f}x ({found.low:.2f} to {found.high:.2f})"
            print(f"{kind}, {length} tokens, heads of {width}: {spread}")
    timing.write(options.json, rows)


if __name__ == "__main__":
    main()
