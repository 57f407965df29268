"""Tries the laws on every target of targets.py, each in a process of its own.

    python census/run.py                    what results.jsonl lacks; then writes results.md
    python census/run.py --only mamba       targets whose name has this
    python census/run.py --page             results.md only

Needs what requirements.txt lists. It can be stopped at any time and goes on from there.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import resource
import time
import warnings
from dataclasses import asdict
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results.jsonl"
PAGE = HERE / "results.md"
BUDGET = 4.0
"""CPU seconds of the laws for a target's large weights, and half of it as initialised."""
MORE = 4
"""Times as much for a target whose *cuts* was not decided in it."""
WALL = 15
"""Seconds on the clock for one of CPU time, at the most."""
INFINITE = 1e9
"""In results.jsonl, a difference that is not finite."""
PRELOADED = (
    *("transformers.models.auto.modeling_auto", "x_transformers", "titans_pytorch", "xlstm"),
    *("torchrl.modules", "minGRU_pytorch.minLM", "recurrent_memory_transformer_pytorch"),
)
DISTRIBUTIONS = {
    "recurrent-memory-transformer": "recurrent-memory-transformer-pytorch",
    "fla": "flash-linear-attention",
}
"""Packages that are named otherwise than their targets."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="*", default=[""], metavar="TEXT", help="names that have it"
    )
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    parser.add_argument("--limit", type=int, default=90, metavar="SECONDS", help="of CPU, for each")
    parser.add_argument("--page", action="store_true", help="write results.md only")
    options = parser.parse_args()
    if not options.page:
        run(options)
    write_page()


def run(options: argparse.Namespace) -> None:
    from targets import TARGETS

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    done = set() if options.again else set(results())
    # What is imported before processes are forked costs once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["targets", *PRELOADED])
    for name in TARGETS:
        if name in done or not any(text in name for text in options.only):
            continue
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=examine, args=(name, options.limit, theirs))
        process.start()
        theirs.close()
        found: dict[str, Any] = {"error": f"not done in {options.limit} s"}
        try:
            if ours.poll(options.limit * WALL):
                found = ours.recv()
        except EOFError:
            # The limit of CPU time ended it.
            pass
        process.kill()
        process.join()
        line = {"target": name, "date": datetime.now(UTC).date().isoformat(), **found}
        with RESULTS.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(name, "|", *cells(line)[1:], flush=True)


def examine(name: str, limit: int, result: Connection) -> None:
    """Check a target with large weights, and what is broken as it is initialised, too."""
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    import torch

    from statelaws import check
    from statelaws.adapters.recipes import randomise
    from targets import TARGETS

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    started = time.process_time()
    found: dict[str, Any] = {}
    try:
        torch.manual_seed(0)
        model = TARGETS[name]()
    except Exception as error:
        found["error"] = said(error)
    else:
        try:
            if getattr(model, "enlarge", True):
                randomise(model.module, 0)
            budget = getattr(model, "budget", BUDGET)
            laws = getattr(model, "laws", None)
            report = check(model, laws, budget=budget)
            if report["cuts"].outcome == "inconclusive":
                report = check(model, laws, budget=MORE * budget)
            found["versions"] = {**report.versions, **version_of(name)}
            found["findings"] = [shown(asdict(finding)) for finding in report.findings]
            if broken := [finding.law for finding in report.broken]:
                torch.manual_seed(0)
                small = check(TARGETS[name](), broken, budget=budget / 2)
                found["initialised"] = [shown(asdict(finding)) for finding in small.findings]
            if recorded := getattr(model, "recording", None):
                again = check(recorded(), ["roll-back"], budget=budget / 2)
                found["recorded"] = [shown(asdict(finding)) for finding in again.findings]
        except Exception as error:
            found["refused"] = said(error)
    found["seconds"] = round(time.process_time() - started, 1)
    result.send(found)


def version_of(name: str) -> dict[str, str]:
    """The version of the library of a target."""
    library = name.partition(":")[0]
    if library in ("torch.nn", "memspan"):
        return {}
    package = DISTRIBUTIONS.get(library, library)
    return {package: importlib.metadata.version(package)}


def said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def shown(finding: dict[str, Any]) -> dict[str, Any]:
    for key in ("difference", "floor"):
        if isinstance(finding[key], float):
            finding[key] = float(f"{min(finding[key], INFINITE):.2g}")
    return {key: value for key, value in finding.items() if value not in (None, "")}


def results() -> dict[str, dict[str, Any]]:
    """The latest result of each target."""
    if not RESULTS.is_file():
        return {}
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    return {line["target"]: line for line in lines}


def verdict(line: dict[str, Any]) -> str:
    """Outcome of a target, in a word or two."""
    if "error" in line:
        return "not done" if line["error"].startswith("not done in") else "could not be built"
    if "refused" in line:
        return "refused"
    outcomes = {finding["law"]: finding["outcome"] for finding in line["findings"]}
    if "broken" in outcomes.values():
        return "broken"
    if set(outcomes.values()) <= {"refused", "not-offered"}:
        return "refused"
    return "nothing broken" if outcomes["cuts"] in ("holds", "not-offered") else "open"


def size(finding: dict[str, Any]) -> str:
    difference = finding.get("difference", 0)
    return "by another shape, or NaN" if difference >= INFINITE else f"{difference:.1g}"


def cells(line: dict[str, Any]) -> list[str]:
    """A row of the table."""
    findings = line.get("findings", [])
    small = {finding["law"]: finding for finding in line.get("initialised", [])}
    broken = []
    for finding in findings:
        if finding["outcome"] != "broken":
            continue
        law = finding["law"]
        also = small.get(law, {})
        number = size(also) if also.get("outcome") == "broken" else "not"
        broken.append(f"{law} {size(finding)} ({number})")
    others = [
        ", ".join(finding["law"] for finding in findings if finding["outcome"] == outcome)
        for outcome in ("refused", "inconclusive")
    ]
    reason = line.get("error") or line.get("refused") or ""
    if verdict(line) == "refused" and findings:
        reason = findings[0].get("detail", "")
        others = ["all", ""]
    if recorded := line.get("recorded"):
        outcome = recorded[0]["outcome"]
        apart = f" {size(recorded[0])}" if outcome == "broken" else ""
        reason = f"roll-back with a recorded past: {outcome}{apart}"
    reason = reason.replace("|", "\\|")[:160]
    return [line["target"], verdict(line), ", ".join(broken), *others, reason]


def write_page() -> None:
    """Write results.md from all results."""
    known = results()
    lines = list(known.values())
    verdicts = [verdict(line) for line in lines]
    counts = ", ".join(f"{verdicts.count(each)} {each}" for each in sorted(set(verdicts)))
    seconds = sum(line.get("seconds", 0) for line in lines)
    names = {
        name.replace("_", "-"): version
        for line in lines
        for name, version in line.get("versions", {}).items()
    }
    versions = ", ".join(f"{name} {names[name]}" for name in sorted(names))
    text = [
        "# Census: the laws on models of many libraries",
        "",
        f"Written by `python census/run.py`: {len(lines)} targets, {seconds / 60:.0f} CPU minutes in",
        f"all: {counts}. Versions: {versions}.",
        "",
        "| target | came out | broken: with large weights (as initialised) | refused | open | remark |",
        "| --- | --- | --- | --- | --- | --- |",
        *(f"| {' | '.join(cells(line))} |" for line in lines),
    ]
    if (notes := HERE / "notes.md").is_file():
        text += ["", notes.read_text().strip()]
    PAGE.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
