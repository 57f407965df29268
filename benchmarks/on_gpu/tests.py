"""Laws and golden tests of the CPU, with everything that they make on the device (tests/device.py)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
TESTS = {
    "laws": [
        "tests/models/test_laws.py",
        "tests/models/test_documents.py",
        "tests/models/test_not_finite.py",
    ],
    "golden": [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests/models").glob("test_golden_*.py"))
    ],
}
WORKERS = 4
"""Processes that run tests on one GPU."""
OUTCOME = re.compile(
    r"(?:^(?P<after>\S+::.+?) )?(?P<is>PASSED|FAILED|ERROR|SKIPPED)(?: (?P<before>\S+::.+))?"
)
MOST_NAMES = 20


def tested(part: str, device: torch.device, only: str | None) -> dict[str, Any]:
    """The number of tests that passed and the names of those that did not, as far as they went: an
    interrupt ends them."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--color=no"]
    command += [*TESTS[part], "-m", "", *(["-k", only] if only else [])]
    if device.type != "cpu" and find_spec("xdist") is not None:
        command += ["-n", str(WORKERS)]
    environment = {**os.environ, "MEMSPAN_DEVICE": str(device), "COLUMNS": "500"}
    counts = dict.fromkeys(("PASSED", "FAILED", "ERROR", "SKIPPED"), 0)
    names: list[str] = []
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    last = ""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as running:
        assert running.stdout is not None
        for line in running.stdout:
            last = line.strip() or last
            if line.startswith(("=", "_")):
                # Reports and summaries repeat what was counted.
                if "short test summary" in line or "FAILURES" in line or "ERRORS" in line:
                    break
                continue
            found = OUTCOME.search(re.sub(r"^\[gw\d+\] (\[ *\d+%\] )?", "", line))
            if found is None or not (found["after"] or found["before"]):
                continue
            counts[found["is"]] += 1
            if found["is"] in ("FAILED", "ERROR"):
                names.append((found["after"] or found["before"]).strip())
        rest = running.communicate()[0].splitlines()
    last = next((line for line in reversed(rest) if line.strip()), last)
    bad = counts["FAILED"] + counts["ERROR"]
    row: dict[str, Any] = {
        "what": "tests",
        "passed": counts["PASSED"],
        "failed": bad,
        "skipped": counts["SKIPPED"],
        "failures": names,
    }
    if bad:
        row["error"] = f"{bad} failed: {', '.join(names[:3])}"
    elif running.returncode != 0 or not counts["PASSED"]:
        row["error"] = f"pytest ended with status {running.returncode}: {last[:200]}"
    return row
