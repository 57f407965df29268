"""Laws, golden tests and speed on a GPU: what of memspan holds there, and how fast it is.

    python benchmarks/gpu.py                        # `make gpu`; where there is no GPU, status 1
    python benchmarks/gpu.py --device cpu --parts laws --only causality

Laws and golden tests are the tests of the CPU, run by pytest with everything that they make on the
device (tests/device.py). Speed: a training step of each architecture against the plain GPT's, in
float32 and bfloat16, and each implementation of the gated delta rule against the chunks in PyTorch;
ratios of wall time, the device waited for. More than 1: faster. Written: results/gpu-NAME.json.
The status is 1 if a test failed, too.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
import torch.nn.functional as F
from torch import Tensor

import timing
from memspan.devices import device_for
from memspan.errors import MemspanError
from memspan.ops.fast_weights.rules import delta_rule
from peers.gpt import PlainGPT
from peers.registry import ARCHITECTURES, SIZES, side_class
from timing import interleaved, machine, ratio
from works import prepared

ROOT = Path(__file__).resolve().parent.parent
TESTS = {
    "laws": [
        "tests/models/test_laws.py",
        "tests/models/test_documents.py",
        "tests/models/test_not_finite.py",
    ],
    "golden": [str(path) for path in sorted((ROOT / "tests/models").glob("test_golden_*.py"))],
}
PARTS = (*TESTS, "speed")
RULE = (4, 8, 512, 128)
"""``[B, H, T, K]`` of the gated delta rule."""
Row = dict[str, Any]


def tested(part: str, device: torch.device, only: str | None) -> Row:
    """The number of tests that passed and the names of those that did not."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS[part]]
        command += [f"--junitxml={report}", *(["-k", only] if only else [])]
        environment = {**os.environ, "MEMSPAN_DEVICE": str(device)}
        ran = subprocess.run(command, cwd=ROOT, env=environment, check=False)
        if not report.exists():
            raise SystemExit(f"{part}: pytest ended with status {ran.returncode} and no report")
        cases = ElementTree.parse(report).findall(".//testcase")
    bad = [
        case for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {
        "part": part,
        "passed": len(cases) - len(bad) - skipped,
        "failed": len(bad),
        "skipped": skipped,
        "failures": [f"{case.get('classname')}::{case.get('name')}" for case in bad],
    }


def clock(device: torch.device) -> float:
    """Wall time when the device has done its work; on a CPU the process's."""
    if device.type == "cpu":
        return time.process_time()
    torch.accelerator.synchronize(device)
    return time.perf_counter()


def gated_rule(device: torch.device) -> dict[str, Callable[[], object]]:
    """Forward and backward by each implementation that can run; fla's from bfloat16, others float32."""
    batch, heads, length, width = RULE
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(batch, heads, length, *shape, generator=generator).to(device)

    q = draw(width) * width**-0.5
    k = F.normalize(draw(width), dim=-1)
    v = draw(width)
    beta = draw().sigmoid()
    decay = -F.softplus(draw())
    memory = torch.zeros(batch, heads, width, width, device=device)

    def step(name: str) -> None:
        dtype = torch.bfloat16 if name == "fla" else torch.float32
        leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        y, _ = delta_rule(*leaves, beta, memory, log_decay=decay, implementation=name)
        torch.autograd.grad(y.float().sum(), leaves)

    able = {}
    for name in ("chunked", "compiled", "fla"):
        try:
            step(name)
        except MemspanError as error:
            print(f"gated delta rule: {error}")
        else:
            able[name] = partial(step, name)
    return able


def speeds(device: torch.device, architectures: list[str], rounds: int) -> list[Row]:
    """Ratios of wall time."""
    rows: list[Row] = []

    def compare(label: Row, sides: dict[str, Callable[[], object]], against: str) -> None:
        times = interleaved(sides, rounds, clock=lambda: clock(device))
        for name in sides:
            if name != against:
                found = asdict(ratio(times[against], times[name]))
                rows.append(label | {"side": name, "against": against, "ratio": found})
                print(f"{label}, {name}: {found['middle']:.2f} times as fast as {against}")

    for architecture in architectures:
        size_name, size = next(iter(SIZES[architecture].items()))
        for precision in ("float32", "bfloat16"):
            kinds = {"memspan": side_class(architecture, "memspan"), "plain-gpt": PlainGPT}
            steps = {
                name: prepared(kind(size), "train", precision, str(device))
                for name, kind in kinds.items()
            }
            label = {"work": "train", "architecture": architecture, "size": size_name}
            compare(label | {"precision": precision}, steps, "plain-gpt")
    label = {"work": "gated delta rule, forward and backward", "shape": RULE}
    compare(label, gated_rule(device), "chunked")
    return rows


def described(device: torch.device) -> Row:
    """The device, and what drives it."""
    found = machine() | {"device": str(device), "device_name": "", "driver": ""}
    if device.type != "cuda":
        return found | {"device_name": str(found["cpu"]) if device.type == "cpu" else device.type}
    found |= {"device_name": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return found | {"driver": said.splitlines()[0].strip()}
    except (OSError, subprocess.CalledProcessError, IndexError):
        return found


def main(arguments: list[str] | None = None) -> int:
    parser = timing.parser(__doc__, rounds=7)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, mps, cpu (default: cuda)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--only", metavar="EXPRESSION", help="tests that match, as pytest's -k")
    parser.add_argument(
        "--architectures", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES)
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="where the results go")
    options = parser.parse_args(arguments)
    try:
        device = device_for(options.device)
    except MemspanError:
        print(
            f"there is no {options.device} here, so nothing was run: this is for a machine with a GPU"
        )
        return 1
    where = described(device)
    tests = [tested(part, device, options.only) for part in TESTS if part in options.parts]
    rows = speeds(device, options.architectures, options.rounds) if "speed" in options.parts else []
    name = re.sub("[^a-z0-9]+", "-", str(where["device_name"]).lower()).strip("-")
    path = options.json or ROOT / "benchmarks" / "results" / f"gpu-{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"tests": tests, "rows": rows, "machine": where}, indent=1) + "\n")
    for row in tests:
        print(
            f"{row['part']}: {row['passed']} passed, {row['failed']} failed, {row['skipped']} skipped"
        )
    print(f"written: {path}")
    return int(any(row["failed"] for row in tests))


if __name__ == "__main__":
    sys.exit(main())
