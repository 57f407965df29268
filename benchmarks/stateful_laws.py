"""The laws of torch's recurrent modules and of every recipe of transformers, in two precisions.

    python benchmarks/stateful_laws.py [--only NAME ...] [--budget SECONDS] [--out FILE]

On a CPU, with tiny random weights; about ten seconds for each model and precision. The file has each
law's outcome, and for broken ones the script that shows it without memspan. The table that is printed
at the end is that of docs/state-laws.md.
"""

from __future__ import annotations

import argparse
import json
import os
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from torch import nn

import memspan
from memspan.stateful import Causal
from memspan.stateful.recipes import RECIPES, build
from memspan.targets import TYPE

OUT = Path(__file__).parent / "results" / "stateful-laws.json"
TORCH = {
    "torch.nn.RNN": nn.RNN,
    "torch.nn.GRU": nn.GRU,
    "torch.nn.LSTM": nn.LSTM,
}
PRECISIONS = {"float32": torch.float32, "float64": torch.float64}


def made(name: str, dtype: torch.dtype) -> nn.Module | Causal:
    """A model of that name."""
    torch.manual_seed(0)
    if name in TORCH:
        return TORCH[name](8, 16, num_layers=2, batch_first=True).to(dtype)
    model = build(name.removeprefix(TYPE))
    model.module.to(dtype)
    if dtype == torch.float64 and hasattr(model.module, "set_experts_implementation"):
        # The default, a grouped product, takes no float64.
        model.module.set_experts_implementation("eager")
    return model


def laws(name: str, dtype: torch.dtype, budget: float) -> dict[str, Any]:
    """The report on a model, or why there is none."""
    try:
        report = memspan.check(made(name, dtype), budget=budget)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    found: dict[str, Any] = json.loads(report.to_json())
    found["findings"] = {f.pop("law"): f for f in found["findings"]}
    del found["versions"]
    return found


def table(models: dict[str, Any]) -> str:
    """What is broken, refused or open, by model and precision, in Markdown."""
    lines = ["| model | float32: broken | float64: broken | refused | open |", "| --- " * 5 + "|"]
    for name, by_dtype in models.items():
        cells = [name.removeprefix(TYPE)]
        for found in by_dtype.values():
            laws = found.get("findings", {}).items()
            cells.append(", ".join(_cell(law, f) for law, f in laws if f["outcome"] == "broken"))
        for outcome in ("refused", "inconclusive"):
            every = {
                law: None
                for found in by_dtype.values()
                for law, f in found.get("findings", {}).items()
                if f["outcome"] == outcome
            }
            cells.append(", ".join(every))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(law: str, finding: dict[str, Any]) -> str:
    apart = finding["difference"]
    return f"{law} {apart:.1g}" if isinstance(apart, float) else law


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="models, such as transformers:mamba")
    parser.add_argument("--budget", type=float, default=30.0, help="seconds for each")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {
        "versions": {name: metadata.version(name) for name in ("torch", "transformers")},
        "models": {},
    }
    for name in options.only or [*TORCH, *(f"{TYPE}{model_type}" for model_type in RECIPES)]:
        by_dtype = {key: laws(name, dtype, options.budget) for key, dtype in PRECISIONS.items()}
        results["models"][name] = by_dtype
        for key, found in by_dtype.items():
            outcomes = {law: f["outcome"] for law, f in found.get("findings", {}).items()}
            broken = [law for law, outcome in outcomes.items() if outcome == "broken"]
            open_ = [law for law, outcome in outcomes.items() if outcome == "inconclusive"]
            print(f"{name} {key}: broken {broken}, inconclusive {open_} {found.get('error', '')}")
        # What was reached is kept.
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results["models"]))


if __name__ == "__main__":
    main()
