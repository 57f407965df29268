"""Proofs of Triton programs without a GPU: guarded storage, and reports of compilers."""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

TARGETS = (("cuda", 80, 32), ("cuda", 90, 32), ("cuda", 100, 32), ("hip", "gfx942", 64))
Row = dict[str, Any]


class Outputs:
    """Storage for what the programs write: NaN, with margins."""

    def __init__(self) -> None:
        self._storages: list[Tensor] = []

    def empty(self, like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        n = torch.Size(shape).numel()
        storage = torch.full((n + 2 * 64,), torch.nan, dtype=dtype or like.dtype)
        self._storages.append(storage)
        return storage[64 : 64 + n].view(shape)

    def check(self) -> None:
        for storage in self._storages:
            assert storage[:64].isnan().all(), "written before the beginning"
            assert storage[-64:].isnan().all(), "written beyond the end"
            assert storage[64:-64].isfinite().all(), "not all is written, or NaN was read"


def seeded(draw: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(draw.getrandbits(40))


@contextmanager
def instead(module: Any, **own: Any) -> Iterator[None]:
    """``own`` functions and values in place of the module's of these names."""
    with mock.patch.multiple(module, **own):
        yield


def assembled(ptx: str, capability: int) -> str:
    """The assembler's report on a program."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "program.ptx")
        path.write_text(ptx, encoding="utf-8")
        name = re.search(r"\.target (\w+)", ptx)
        assert name is not None
        # As Triton's own call of it.
        command = [
            get_ptxas(capability).path,
            "--regAllocOptLevel=2",
            "-v",
            f"-arch={name[1]}",
            path,
            "-o",
            path.with_suffix(".cubin"),
        ]
        ran = subprocess.run(command, check=False, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr[-1000:]
        return ran.stdout + ran.stderr


def number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, f"the compiler does not say {pattern}"
    return int(found[1])


def report(result: Any, dtype: torch.dtype, target: tuple[Any, ...]) -> Row:
    """Bytes of shared memory, registers of a thread and those that are spilled, as the compiler reports
    them of the compiled program ``result``."""
    row = {
        "dtype": str(dtype).removeprefix("torch."),
        "target": target[1] if target[0] == "hip" else f"sm_{target[1]}",
        "shared": result.metadata.shared,
    }
    if target[0] == "hip":
        text = result.asm["amdgcn"]
        row["registers"] = number(r"\.vgpr_count:\s+(\d+)", text)
        row["spilled"] = number(r"\.vgpr_spill_count:\s+(\d+)", text)
    else:
        text = assembled(result.asm["ptx"], target[1])
        row["registers"] = number(r"Used (\d+) registers", text)
        row["spilled"] = number(r"(\d+) bytes spill stores", text)
    return row


def print_compiled(
    compiled: Callable[..., Row], names: Sequence[str], sizes: Sequence[Any], only: Sequence[str]
) -> None:
    """Compile every program for every target, or ``only`` some, and print a line for each; stop with
    status 1 if some spill.

    Args:
        compiled: compiles one, from its name, type, size and target.
    """
    spilled = 0
    for target in TARGETS:
        if only and str(target[1]) not in only:
            continue
        for dtype in (torch.float32, torch.bfloat16):
            for size in sizes:
                for name in names:
                    row = compiled(name, dtype, size, target)
                    spilled += row["spilled"]
                    print(json.dumps(row), flush=True)
    if spilled:
        raise SystemExit("some programs spill")


def verbs_of(parser: argparse.ArgumentParser) -> Any:
    """The verbs of a script: shapes, and room for its own."""
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("shapes", help="compare random shapes in Triton's interpreter")
    verb.add_argument("--shapes", type=int, default=100, metavar="N")
    verb.add_argument(
        "--seed", type=int, default=0, help="of the first shape; the next has the next"
    )
    return verbs
