"""Instructions that short workloads take, compared with those that are stored.

    python benchmarks/instructions.py              # make instructions
    python benchmarks/instructions.py --store      # make instructions-store

Counted by valgrind, which needs none of the processor's counters. Counts do not depend on what else the
machine does, nor on the processor if it is x86-64 with AVX2, for valgrind shows programs a processor of
its own. One thread, and PyTorch is held to AVX2, as valgrind knows no AVX-512. Start-up and first calls
are not counted.

``results/instructions.json`` has the counts of one call, in thousands, and the versions that they
depend on: CI has the same, those of Debian 12. With other versions nothing is compared: a line says
which differ, and the status is 2. A workload whose count is off by more than 3 % fails, status 1: store
counts anew if the change is meant.

Instructions are not time: an access to memory counts as one, wherever the memory is. ``make bench``
measures time.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from memspan.memory import Memory
from memspan.models import LanguageModel
from memspan.models.registry import MODELS
from memspan.native import library
from memspan.ops.delta_rules.rule import generalized_delta_rule
from memspan.ops.fast_weights import compiled
from memspan.ops.fast_weights.feature_maps import DPFP
from memspan.ops.fast_weights.rules import delta_rule
from memspan.ops.relative import Positions, relative_attention

Call = Callable[[], object]
STORED = Path(__file__).resolve().parent / "results" / "instructions.json"
TOLERANCE = 0.03
SETTINGS = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}
SIZES = {"n_layers": 2, "d_model": 64, "n_heads": 2, "d_ff": 256, "memory_length": 32}
ARCHITECTURES = ("transformer-xl", "compressive", "feedback", "fast-weights", "gated-delta-net")
CALLS = 4
"""Counted calls, whose mean is reported."""


def model(name: str) -> LanguageModel:
    """A small model, the same each time."""
    torch.manual_seed(0)
    kind = MODELS[name]
    own = {field.name for field in fields(kind)}
    return LanguageModel(256, kind(**{name: size for name, size in SIZES.items() if name in own}))


def token(name: str) -> Call:
    """The next token of one row, with a full memory that is written in place."""
    reader = model(name).eval().reader(batch_size=1)
    reader.read(torch.arange(96)[None])
    one = torch.tensor([[97]])
    return lambda: reader.read(one)


def training(name: str) -> Call:
    """Two rows of 32 tokens forward and backward: PyTorch's optimisers are its own, and importing them
    in valgrind takes a minute."""
    made = model(name)
    tokens = torch.arange(64).view(2, 32)
    with torch.no_grad():
        memory = made(tokens).memory

    def call() -> None:
        made(tokens, memory, targets=tokens).loss.backward()
        made.zero_grad()

    return call


def delta(implementation: str, decay: bool = False, dpfp: bool = False) -> Call:
    """The delta rule of 64 tokens, forward and backward."""
    torch.manual_seed(0)
    q, k, v = (F.normalize(torch.randn(1, 2, 64, 32), dim=-1).requires_grad_() for _ in range(3))
    beta = torch.rand(1, 2, 64, requires_grad=True)
    before = torch.randn(1, 2, 64 if dpfp else 32, 32)
    log_decay = (-torch.rand(1, 2, 64)).requires_grad_() if decay else None
    feature_map = DPFP() if dpfp else None
    given = [q, k, v, beta, *([] if log_decay is None else [log_decay])]

    def call() -> None:
        y, _ = delta_rule(
            q,
            k,
            v,
            beta,
            before,
            log_decay=log_decay,
            feature_map=feature_map,
            implementation=implementation,
        )
        torch.autograd.grad(y.sum(), given)

    return call


def general(implementation: str) -> Call:
    """The generalized delta rule of 64 tokens, with a decay per channel, forward and backward."""
    torch.manual_seed(0)
    q, k, v = (F.normalize(torch.randn(1, 2, 64, 32), dim=-1).requires_grad_() for _ in range(3))
    log_decay = (-torch.rand(1, 2, 64, 32)).requires_grad_()
    before = torch.randn(1, 2, 32, 32)

    def call() -> None:
        y, _ = generalized_delta_rule(
            q, k, v, before, log_decay=log_decay, erase=k, lookup=k, implementation=implementation
        )
        torch.autograd.grad(y.sum(), [q, k, v, log_decay])

    return call


def attention() -> Call:
    """Relative attention of 32 tokens to themselves and 32 before them, forward and backward."""
    torch.manual_seed(0)
    q = torch.randn(1, 2, 32, 32, requires_grad=True)
    k, v = (torch.randn(1, 2, 64, 32, requires_grad=True) for _ in range(2))
    positions = Positions(torch.randn(2, 64, 32))
    mask = torch.ones(1, 32, 64, dtype=torch.bool).tril(32)
    given = [q, k, v]
    return lambda: torch.autograd.grad(
        relative_attention(q, k, v, positions, mask=mask).sum(), given
    )


def memory_file() -> Call:
    """A memory saved to a file and loaded from it."""
    with torch.no_grad():
        memory = model("transformer-xl")(torch.arange(64)[None]).memory
    path = Path("memory.safetensors")

    def call() -> Memory:
        memory.save(path, "")
        return type(memory).load(path, "")

    return call


WORKLOADS: dict[str, Callable[[], Call]] = {
    **{f"token, {name}": partial(token, name) for name in (*ARCHITECTURES, "kda")},
    **{f"training, {name}": partial(training, name) for name in ARCHITECTURES},
    "delta rule in C, DPFP": partial(delta, "compiled", dpfp=True),
    "delta rule in C, decay": partial(delta, "compiled", decay=True),
    "delta rule in PyTorch": partial(delta, "chunked"),
    "delta rule in PyTorch, decay": partial(delta, "chunked", decay=True),
    "general rule in C": partial(general, "compiled"),
    "general rule in PyTorch": partial(general, "chunked"),
    "relative attention": attention,
    "memory to a file and back": memory_file,
}


# ----- In valgrind


def run_workloads(markers: Path) -> None:
    """Run all workloads, calls to be counted between two markers, and print the versions."""
    torch.set_num_threads(1)
    marks = ctypes.CDLL(str(markers))
    for name, prepare in WORKLOADS.items():
        call = prepare()
        for _ in range(2):
            call()
        gc.collect()
        gc.disable()
        marks.start()
        for _ in range(CALLS):
            call()
        marks.stop(name.encode())
        gc.enable()
    print(json.dumps(versions()))


def versions() -> dict[str, str]:
    """Versions of what is counted, and of what counts."""
    valgrind = subprocess.run(["valgrind", "--version"], capture_output=True, text=True, check=True)
    # How it was configured changes its counts by more than its version does.
    options = sysconfig.get_config_var("CONFIG_ARGS") or ""
    optimised = ", optimised by profile" if "--enable-optimizations" in options else ""
    return {
        "python": f"{platform.python_version()} by {platform.python_compiler()}{optimised}",
        "torch": torch.__version__,
        "compiler": compiler(),
        "valgrind": valgrind.stdout.strip().removeprefix("valgrind-"),
        "system": f"{platform.system()} {platform.machine()}",
    }


def compiler() -> str:
    """The compiler of the loops in C, as it has written itself into them."""
    code = library.functions(compiled.SOURCE, torch.float32, False)
    if code is None:
        return "none"
    found = re.search(rb"(?:GCC: \(|clang version )[^\0]*", Path(code._name).read_bytes())
    return found[0].decode() if found else "unknown"


# ----- Around valgrind


def count() -> tuple[dict[str, float], dict[str, str]]:
    """Thousands of instructions of a call of each workload, and the versions."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        markers = folder / "markers.so"
        source = Path(__file__).with_name("markers.c")
        subprocess.run(
            ["cc", "-O2", "-shared", "-fPIC", str(source), "-o", str(markers)], check=True
        )
        tool = ["--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/counts"]
        done = subprocess.run(
            ["valgrind", "-q", *tool, sys.executable, str(Path(__file__).resolve()), str(markers)],
            check=True,
            cwd=folder,
            env=os.environ | SETTINGS,
            stdout=subprocess.PIPE,
            text=True,
        )
        counts = {}
        for path in folder.glob("counts.*"):
            text = path.read_text()
            named = re.search(r"^desc: Trigger: Client Request: (.*)$", text, re.MULTILINE)
            total = re.search(r"^totals: (\d+)$", text, re.MULTILINE)
            if named and total:
                counts[named[1]] = int(total[1]) / CALLS / 1000
    return {name: round(counts[name], 1) for name in WORKLOADS}, json.loads(done.stdout)


def compare(counts: dict[str, float], stored: dict[str, float]) -> list[str]:
    """Print counts beside those stored, and return the workloads that are off or not stored."""
    off = []
    for name, new in counts.items():
        old = stored.get(name)
        change = "not stored" if old is None else f"{new / old - 1:+.2%}"
        print(f"{name:34} {new:12,.1f} {change:>10}")
        if old is None or abs(new / old - 1) > TOLERANCE:
            off.append(name)
    return off


def main() -> None:
    for command in ("valgrind", "cc"):
        if shutil.which(command) is None:
            sys.exit(f"{command} is not here: install it")
    counts, found = count()
    if sys.argv[1:] == ["--store"]:
        compare(counts, counts)
        STORED.write_text(json.dumps({"versions": found, "thousands": counts}, indent=1) + "\n")
        return
    stored = json.loads(STORED.read_text())
    differ = [
        f"{name} {found[name]}, stored for {version}"
        for name, version in stored["versions"].items()
        if found[name] != version
    ]
    if differ:
        print(f"not compared: {'; '.join(differ)}. make instructions-store stores counts anew")
        sys.exit(2)
    off = compare(counts, stored["thousands"])
    if off:
        sys.exit(f"off by more than {TOLERANCE:.0%}: {', '.join(off)}")


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].endswith(".so"):
        run_workloads(Path(sys.argv[1]))
    else:
        main()
