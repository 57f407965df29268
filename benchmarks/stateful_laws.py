"""The laws of torch's recurrent modules and of every recipe of transformers, in two precisions.

    python benchmarks/stateful_laws.py [--only NAME ...] [--budget SECONDS] [--jobs N] [--out FILE]
    PYTHONPATH=FOLDER python benchmarks/stateful_laws.py --since
    python benchmarks/stateful_laws.py --page

On a CPU, with tiny random weights; about ten seconds for each model and precision. The file has each
law's outcome, and for broken ones the script that shows it without memspan. Models of transformers are
also asked, in float32, what they do not promise: to read on after padding on the right.

``--since`` tries what is broken in the stored results with another release of transformers, which
``pip install --target FOLDER transformers==X`` put into a folder, and keeps the outcomes in a second
file. Both, and ``--page`` alone, end with writing the tables of docs/state-laws.md.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from torch import nn

import memspan
import page_tables
import timing
from statelaws import Causal
from statelaws.adapters.recipes import RECIPES, build
from statelaws.targets import TYPE

OUT = timing.RESULTS / "stateful-laws.json"
PAGE = page_tables.DOCS / "state-laws.md"
SINCE = OUT.with_name("stateful-laws-since.json")
TORCH = {
    "torch.nn.RNN": nn.RNN,
    "torch.nn.GRU": nn.GRU,
    "torch.nn.LSTM": nn.LSTM,
}
ASKED = "read on after padding on the right"
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


def laws(name: str, precision: str, budget: float, only: list[str] | None = None) -> dict[str, Any]:
    """The report on a model, or why there is none."""
    torch.set_num_threads(1)
    try:
        model = made(name, PRECISIONS[precision])
        report = memspan.check(model, only, budget=budget)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    found: dict[str, Any] = json.loads(report.to_json())
    found["findings"] = {f.pop("law"): f for f in found["findings"]}
    del found["versions"]
    promised = isinstance(model, Causal) and "right-last" in model.claims.padding
    if promised and precision == "float32" and only is None:
        model.claims = replace(model.claims, padding=frozenset({"right"}))
        asked = memspan.check(model, ["padding-right"], budget=budget)
        found[ASKED] = asked["padding-right"].outcome
    return found


def table(models: dict[str, Any]) -> str:
    """Table of broken, refused and inconclusive laws, by model and precision, in Markdown."""
    lines = [["model", "float32: broken", "float64: broken", "refused", "open"]]
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
        lines.append(cells)
    return page_tables.markdown(lines)


def _cell(law: str, finding: dict[str, Any]) -> str:
    apart = finding["difference"]
    return f"{law} {apart:.1g}" if isinstance(apart, float) else law


def continued(models: dict[str, Any]) -> str:
    """List models by the outcome of reading on after right padding, in words."""
    lines = []
    for outcome in ("holds", "broken", "inconclusive", "refused", "not-offered"):
        found = {name: by_dtype["float32"].get(ASKED) for name, by_dtype in models.items()}
        names = [name.removeprefix(TYPE) for name in found if found[name] == outcome]
        if names:
            lines.append(f"- {outcome}: {', '.join(names)}")
    return "\n".join(lines)


def broken(models: dict[str, Any]) -> dict[str, list[str]]:
    """Model -> the laws that it breaks, in either precision."""
    found = {
        name: [
            law
            for law in by_dtype["float32"].get("findings", {})
            if any(r["findings"][law]["outcome"] == "broken" for r in by_dtype.values())
        ]
        for name, by_dtype in models.items()
    }
    return {name: laws for name, laws in found.items() if laws}


def since_table() -> str:
    """By model and law, what came of it in each release, in Markdown."""
    stored = json.loads(OUT.read_text())
    releases = json.loads(SINCE.read_text())
    now = stored["versions"]["transformers"]
    lines = [["model", "law", *releases, now]]
    for name, names in broken(stored["models"]).items():
        for law in names:
            cells = [_came(release.get(name, {}), law) for release in releases.values()]
            cells.append(_came(stored["models"][name], law))
            lines.append([name.removeprefix(TYPE), law, *cells])
    return page_tables.markdown(lines)


def _came(by_dtype: dict[str, Any], law: str) -> str:
    """The worse of both precisions."""
    if any("Unrecognized model" in found.get("error", "") for found in by_dtype.values()):
        return "no such model"
    if any("error" in found for found in by_dtype.values()):
        return "cannot be read"
    findings = [found["findings"][law] for found in by_dtype.values()]
    for outcome in ("broken", "refused", "inconclusive"):
        for finding in findings:
            if finding["outcome"] == outcome:
                return _cell(outcome, finding) if outcome == "broken" else outcome
    return str(findings[0]["outcome"])


def tables() -> dict[str, str]:
    """Tables for docs/state-laws.md."""
    models = json.loads(OUT.read_text())["models"]
    return {"laws": table(models), "asked": continued(models), "since": since_table()}


def main() -> None:
    parser = timing.parser(__doc__)
    parser.add_argument("--only", nargs="*", help="models, such as transformers:mamba")
    parser.add_argument("--budget", type=float, default=30.0, help="CPU seconds for each")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE")
    parser.add_argument("--since", action="store_true", help="what is broken, in this release")
    parser.add_argument("--page", action="store_true", help="write the page from the results only")
    options = parser.parse_args()
    if options.page:
        page_tables.write(PAGE, tables())
        return
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    models: dict[str, Any] = {}
    only = broken(json.loads(OUT.read_text())["models"]) if options.since else {}
    names = list(only) or options.only or [*TORCH, *(f"{TYPE}{kind}" for kind in RECIPES)]
    tasks = [(n, key, options.budget, only.get(n)) for n in names for key in PRECISIONS]
    # Some models leave much behind in memory.
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.jobs, maxtasksperchild=10) as pool:
        jobs = [pool.apply_async(laws, task) for task in tasks]
        for (name, key, *_), job in zip(tasks, jobs, strict=True):
            found = job.get()
            models.setdefault(name, {})[key] = found
            outcomes = {law: f["outcome"] for law, f in found.get("findings", {}).items()}
            failed = [law for law, outcome in outcomes.items() if outcome == "broken"]
            open_ = [law for law, outcome in outcomes.items() if outcome == "inconclusive"]
            print(f"{name} {key}: broken {failed}, inconclusive {open_} {found.get('error', '')}")
            if options.since:
                for finding in found.get("findings", {}).values():
                    del finding["script"]
            else:
                # What was reached is kept.
                results = {"versions": versions, "models": models}
                options.out.write_text(json.dumps(results, indent=1) + "\n")
    if options.since:
        releases = json.loads(SINCE.read_text()) | {versions["transformers"]: models}
        SINCE.write_text(json.dumps(releases, indent=1) + "\n")
    if options.since or (options.out == OUT and not options.only):
        page_tables.write(PAGE, tables())


if __name__ == "__main__":
    main()
