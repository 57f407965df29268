"""Runs the laws on closed bugs of state, each at the release that had it and at the one that mends it.

    python backtest/run.py                     all of bugs.toml; writes results.json and results.md
    python backtest/run.py mamba2-slow-path    some of them, which replace their earlier results

Needs uv, which makes an environment for each release (hundreds of megabytes each, links where it can).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BUGS = HERE / "bugs.toml"
RESULTS = HERE / "results.json"
TABLE = HERE / "results.md"
SOURCES = HERE.parent / "src"
TORCH = "torch==2.13.0"
ALSO = {
    # What a release needs beside what it asks for, or an upper bound that it forgot.
    "transformers": ["numpy<2.5"],
    "x-transformers": ["packaging"],
    "native-sparse-attention-pytorch": ["tqdm"],
    "flash-linear-attention": ["transformers<5"],
    "continual-inference": ["numpy<2"],
}
NONE = "-"
SECONDS = 900
"""A model's time, with imports; the laws' own budget is the default."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bugs", nargs="*", metavar="ID", help="bugs to run (all)")
    parser.add_argument(
        "--environments", type=Path, default=HERE / "environments", help="folder for environments"
    )
    parser.add_argument("--prepare", action="store_true", help="make the environments only")
    options = parser.parse_args()
    bugs = tomllib.loads(BUGS.read_text())["bug"]
    if unknown := {*options.bugs} - {bug["id"] for bug in bugs}:
        sys.exit(f"run.py: there is no bug {unknown.pop()}: see {BUGS}")
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    for bug in bugs:
        if options.bugs and bug["id"] not in options.bugs:
            continue
        runs = {"faulty": run(bug, "faulty", options)}
        # Of the release that mends it, what was broken is of interest.
        laws = sorted({bug["law"], *broken(runs["faulty"])} - {"none"})
        runs["fixed"] = run(bug, "fixed", options, laws)
        if options.prepare:
            continue
        if RESULTS.is_file():
            results = json.loads(RESULTS.read_text())
        results[bug["id"]] = {"date": datetime.now(UTC).date().isoformat(), **runs}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        TABLE.write_text(table(bugs, results))
        print(row(bug, results[bug["id"]]), flush=True)


def run(
    bug: dict[str, Any], side: str, options: argparse.Namespace, laws: Sequence[str] = ()
) -> dict[str, Any]:
    """Check the models of a bug in the environment of a release (no ``laws``: all of them)."""
    python = sys.executable
    if bug["how"] == "release":
        try:
            python = environment(bug["package"], bug[side], options.environments)
        except subprocess.CalledProcessError as error:
            print(
                f"{bug['package']} {bug[side]} cannot be installed:\n{error.stderr}",
                file=sys.stderr,
            )
            return {"error": f"cannot be installed: {error.stderr[-300:]}"}
    if options.prepare:
        return {}
    environ = {
        **os.environ,
        "PYTHONPATH": str(SOURCES),
        "PYTHONWARNINGS": "ignore",
        "TRANSFORMERS_VERBOSITY": "error",
        "OMP_NUM_THREADS": "1",
    }
    command = [python, str(HERE / "models.py"), bug["id"], side, *laws]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environ, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done in {SECONDS} s"}
    if done.returncode:
        return {"error": done.stderr.strip()[-600:]}
    return json.loads(done.stdout.splitlines()[-1])


def environment(package: str, version: str, folder: Path) -> str:
    """The Python of an environment with that release, which is made if it is missing."""
    home = folder / f"{package}-{version}"
    python = home / "bin" / "python"
    done = home / "done"
    if not done.exists():
        quiet = {"check": True, "capture_output": True, "text": True}
        subprocess.run(["uv", "venv", "-q", "--clear", "--python", sys.executable, home], **quiet)
        wanted = [f"{package}=={version}", TORCH, *ALSO.get(package, [])]
        install = ["uv", "pip", "install", "-q", "--python", python, *wanted]
        subprocess.run(install, **quiet)
        done.touch()
    return str(python)


def broken(run: dict[str, Any]) -> dict[str, str]:
    """The broken laws of a run's models, and their smallest cases, each once."""
    found: dict[str, str] = {}
    for model in run.get("models", {}).values():
        for law in model["findings"]:
            if law["outcome"] == "broken":
                found.setdefault(law["law"], law["detail"])
    return found


def verdict(bug: dict[str, Any], result: dict[str, Any]) -> str:
    """Say what the laws made of a bug."""
    if "error" in result["faulty"]:
        return "not run"
    gone = mended(result)
    if bug["law"] in gone:
        return "found"
    if gone:
        return "found by another law"
    after = result["fixed"].get("models", {}).values()
    if broken(result["faulty"]) and all(model["findings"][0]["law"] == "all" for model in after):
        return "seen, and its repair could not be read"
    if broken(result["faulty"]):
        return "seen, and after the repair too" if bug["law"] != "none" else "missed, as expected"
    if all(_refused(model) for model in result["faulty"]["models"].values()):
        return "raises an error"
    return "missed" if bug["law"] != "none" else "missed, as expected"


def _refused(model: dict[str, Any]) -> bool:
    return any(
        law["law"] in ("all", "cuts") and law["outcome"] == "refused" for law in model["findings"]
    )


def mended(result: dict[str, Any]) -> set[str]:
    """Laws that the repair mends: no longer broken by a model, or by larger cases or much less only."""
    found = set()
    for name, model in result["faulty"].get("models", {}).items():
        after = result["fixed"].get("models", {}).get(name, {"findings": []})
        left = {law["law"]: law for law in after["findings"]}
        for law in model["findings"]:
            if law["outcome"] != "broken":
                continue
            if (now := left.get(law["law"])) and _less(now, law):
                found.add(law["law"])
    return found


def _less(now: dict[str, Any], before: dict[str, Any]) -> bool:
    if now["outcome"] != "broken":
        # Some repairs refuse what was wrong.
        return now["outcome"] in ("holds", "inconclusive", "refused")
    much = 5 * (now["difference"] or 1) < (before["difference"] or 0)
    return much or tokens(now["detail"]) > tokens(before["detail"])


def tokens(detail: str) -> int:
    """Tokens of a case, as it is written."""
    case = re.search(r"rows? of ([\dx +]+) tokens?", detail)
    if case is None:
        return 0
    terms = [term.split(" x ") for term in case[1].split(" + ")]
    return sum(math.prod(int(n) for n in term) for term in terms)


def row(bug: dict[str, Any], result: dict[str, Any]) -> str:
    """A row of the table."""
    faulty, fixed = (broken(result[side]) for side in ("faulty", "fixed"))
    case = faulty.get(bug["law"]) or next(iter(faulty.values()), "")
    seconds = [m["seconds"] for m in result["faulty"].get("models", {}).values()]
    number = bug["issue"].rpartition("/")[2]
    which = bug["how"] if bug["how"] != "release" else f"{bug['faulty']} / {bug['fixed']}"
    cells = (
        f"[{bug['project']}#{number}]({bug['issue']})",
        which,
        bug["law"],
        ", ".join(faulty) or NONE,
        case or NONE,
        ", ".join(fixed) or NONE,
        f"{max(seconds):.0f}" if seconds else NONE,
        verdict(bug, result),
    )
    return f"| {' | '.join(cells)} |"


def table(bugs: list[dict[str, Any]], results: dict[str, Any]) -> str:
    """All results, as a page."""
    ran = [bug for bug in bugs if bug["id"] in results]
    verdicts = [verdict(bug, results[bug["id"]]) for bug in ran]
    counts = ", ".join(f"{verdicts.count(each)} {each}" for each in dict.fromkeys(verdicts))
    notes = HERE / "notes.md"
    lines = [
        "# Closed bugs of state, and what the laws find of them",
        "",
        f"Written by `python backtest/run.py`. {len(ran)} of {len(bugs)} were run: {counts}.",
        "Each with all laws and the default budget; releases on both sides of the repair.",
        "",
        "| bug | faulty / fixed | law expected | laws broken | smallest case | after the repair "
        "| CPU s | verdict |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *(row(bug, results[bug["id"]]) for bug in ran),
    ]
    if notes.is_file():
        lines += ["", notes.read_text().strip()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
