"""Record the cases of the generalized delta rule from flash-linear-attention's plain recurrences.

The package itself need not be installed, which would bring Triton: the source of each recurrence is run
from the unpacked wheel, with float64 in place of float32. It imports einops.

    pip download --no-deps fla-core==0.6.0 && python -m zipfile -e fla_core-*.whl fla-core
    python tests/recorded/from_fla.py fla-core tests/recorded/fla_generalized
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

VERSION = "0.6.0"
B = 2
H = 2
T = 21
K = 6
V = 5
HOUSEHOLDER = 2
"""Steps per token of DeltaProduct."""
CASES: dict[str, tuple[str, str, dict[str, tuple[int, ...]]]] = {
    "gla": ("gla/naive.py", "naive_recurrent_gla", {"gk": (T, K)}),
    "simple_gla": ("simple_gla/naive.py", "naive_recurrent_simple_gla", {"g": (T,)}),
    "retention": ("retention/naive.py", "naive_retention", {}),
    "gated_delta_rule": (
        "gated_delta_rule/naive.py",
        "naive_recurrent_gated_delta_rule",
        {"beta": (T,), "g": (T,)},
    ),
    "kda": ("kda/naive.py", "naive_recurrent_kda", {"g": (T, K), "beta": (T,)}),
    "gdn2": ("gdn2/naive.py", "naive_recurrent_gdn2", {"g": (T, K), "b": (T, K), "w": (T, V)}),
    "dplr": (
        "generalized_delta_rule/dplr/naive.py",
        "dplr_recurrence",
        {"alpha": (T, K), "beta": (T, K), "gk": (T, K)},
    ),
    "iplr": (
        "generalized_delta_rule/iplr/naive.py",
        "iplr_recurrence",
        {"alpha": (T, K), "beta": (T, K)},
    ),
    "delta_product": (
        "gated_delta_product/naive.py",
        "naive_recurrent_gated_delta_product",
        {"g": (T,), "beta": (T * HOUSEHOLDER,)},
    ),
}
"""By name: file, function, and what it takes besides queries, keys and values, per row and head."""
HEADS_FIRST = ("dplr", "iplr", "retention")
"""Recurrences that take ``[B, H, T, ...]``; the others take ``[B, T, H, ...]``."""
GATES = ("b", "w", "beta")
DECAYS = ("g", "gk")


def in_float64(source: str) -> str:
    """Source code that computes in float64 where it named float32."""
    source = re.sub(r"torch\.float(32)?\b", "torch.float64", source)
    return source.replace(".float()", ".double()")


def function(tree: Path, name: str) -> Callable[..., Any]:
    """The recurrence, computing in float64."""
    file, called, _ = CASES[name]
    source = in_float64((tree / "fla/ops" / file).read_text())
    scope: dict[str, Any] = {}
    exec(compile(source, file, "exec"), scope)
    found: Callable[..., Any] = scope[called]
    return found


def draw(name: str) -> dict[str, Tensor]:
    """Inputs in float32, heads first: keys of length 1, gates in (0, 1), decays from almost none to
    strong ones."""
    generator = torch.Generator().manual_seed(49)

    def normal(*shape: int) -> Tensor:
        return torch.randn(B, H, *shape, generator=generator)

    written = T * HOUSEHOLDER if name == "delta_product" else T
    given = {
        "q": normal(T, K),
        "k": F.normalize(normal(written, K), dim=-1),
        "v": normal(written, V),
    }
    for extra, shape in CASES[name][2].items():
        x = normal(*shape)
        if extra in DECAYS:
            x = -(x.abs() ** 4)
        elif name in ("dplr", "iplr"):
            # A key is looked up and erased in part, as in RWKV-7.
            x = F.normalize(x, dim=-1)
        else:
            x = x.sigmoid()
        given[extra] = x
    if name in ("dplr", "iplr"):
        given["beta"] = -0.9 * given["alpha"]
    given["w_o"] = normal(T, V)
    if name != "retention":
        given |= {"initial_state": normal(K, V), "w_state": normal(K, V)}
    return {n: t.float() for n, t in given.items()}


def record(tree: Path, out: Path, name: str) -> None:
    """Write ``NAME.safetensors`` and ``NAME.json``."""
    given = draw(name)
    leaves = {n: t.double().requires_grad_() for n, t in given.items() if not n.startswith("w_")}
    called = {
        n: t if name in HEADS_FIRST or n == "initial_state" else t.transpose(1, 2)
        for n, t in leaves.items()
    }
    if name == "delta_product":
        called |= {"scale": K**-0.5, "num_householder": HOUSEHOLDER}
    if name == "retention":
        y = function(tree, name)(**called)
        loss = (y * given["w_o"]).sum()
        found = {"o": y}
    else:
        y, state = function(tree, name)(**called, output_final_state=True)
        y = y if name in HEADS_FIRST else y.transpose(1, 2)
        loss = (y * given["w_o"]).sum() + (state * given["w_state"]).sum()
        found = {"o": y, "final_state": state}
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    found |= {"loss": loss} | dict(zip((f"gradin.{n}" for n in leaves), gradients, strict=True))
    tensors = {f"in.{n}": t.contiguous() for n, t in given.items()}
    tensors |= {f"f64.{n}": t.detach().contiguous() for n, t in found.items()}
    save_file(tensors, out / f"{name}.safetensors")
    file, called_name, _ = CASES[name]
    about = {
        "set": out.name,
        "name": name,
        "file": f"{name}.safetensors",
        "peer": {
            "repo": "fla-org/flash-linear-attention",
            "release": VERSION,
            "file": f"fla/ops/{file}",
            "class": called_name,
        },
        "what": "Plain recurrence; inputs and results are [B, H, T, ...], whatever its own layout",
        "config": {"op": name, "B": B, "H": H, "T": T, "K": K, "V": V, "householder": HOUSEHOLDER},
        "tied_parameters": [],
        "parameters_without_gradient": [],
    }
    (out / f"{name}.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    target.mkdir(exist_ok=True)
    for case in CASES:
        record(source, target, case)
