"""Proofs of Triton programs without a GPU: guarded storage, and reports of compilers."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import os
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

RESULTS = Path(__file__).resolve().parent / "results" / "interpreted.json"
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


# ----- Random shapes


def interpret() -> None:
    """Let programs run in Triton's interpreter, one thread, mended where it is wrong or slow."""
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    mend_bfloat16()
    _patch_modules_once()
    _remember_types()


def mend_bfloat16() -> None:
    """The interpreter keeps bfloat16 as integers of 16 bits: it multiplies those, and cuts off the rest
    of a number, in place of rounding to the nearest as GPUs do. Let products be of float32, and let it
    round."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    multiply = builder.create_dot
    cut = builder.create_fp_trunc

    def dot(a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype == tl.bfloat16:
            a = builder.create_fp_ext(a, tl.float32)
            b = builder.create_fp_ext(b, tl.float32)
        return multiply(a, b, *rest)

    def rounded(source: Any, kind: Any) -> Any:
        if source.dtype.scalar == tl.float32 and kind.scalar == tl.bfloat16:
            number = torch.from_numpy(source.data.copy())
            # Exact, so that nothing is left to cut off.
            source = interpreter.TensorHandle(number.bfloat16().float().numpy(), source.dtype)
        return cut(source, kind)

    builder.create_dot = dot
    builder.create_fp_trunc = rounded


def _patch_modules_once() -> None:
    """Patch the language once for each module in a launch, not for every function that a program
    calls: that takes most of the time."""
    from triton.runtime import interpreter

    launch = interpreter.GridExecutor.__call__
    patch = interpreter._patch_lang
    patched: set[int] = set()

    def launch_anew(self: Any, *args: Any, **options: Any) -> Any:
        patched.clear()
        return launch(self, *args, **options)

    def call(self: Any, *args: Any, **options: Any) -> Any:
        if id(self.fn.__globals__) not in patched:
            patched.add(id(self.fn.__globals__))
            patch(self.fn)
        return self.rewrite()(*args, **options)

    interpreter.GridExecutor.__call__ = launch_anew
    interpreter.InterpretedFunction.__call__ = call


def _remember_types() -> None:
    """Make a type or shape of the language once, not for every tensor, and do not look for overflows of
    integers: the same numbers in half of the time."""
    import triton.language as tl
    from triton.language import core
    from triton.runtime import interpreter

    make_block = core.block_type.__init__
    make_tensor = core.tensor.__init__
    blocks: dict[Any, Any] = {}
    shapes: dict[Any, Any] = {}
    scalars = functools.cache(interpreter._get_np_dtype)
    addresses = scalars(tl.uint64)

    def block(self: Any, element: Any, shape: Any) -> None:
        key = (element.name, *(getattr(n, "value", n) for n in shape))
        if key not in blocks:
            make_block(self, element, shape)
            blocks[key] = dict(self.__dict__)
        self.__dict__.update(blocks[key])

    def tensor(self: Any, handle: Any, kind: Any) -> None:
        key = tuple(kind.shape.values) if kind.is_block() else ()
        if key not in shapes:
            make_tensor(self, handle, kind)
            shapes[key] = (self.shape, self.numel)
        self.handle = handle
        self.type = kind
        self.dtype = kind.scalar
        self.shape, self.numel = shapes[key]

    def number_type(kind: Any) -> Any:
        return addresses if kind.scalar.is_ptr() else scalars(kind.scalar)

    core.block_type.__init__ = block
    core.tensor.__init__ = tensor
    interpreter._get_np_dtype = number_type
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def compare_shapes(
    compare: Callable[[random.Random, bool], Row], given: argparse.Namespace
) -> None:
    """Compare random shapes, of which every tenth is large, and print how many there were and the worst
    difference of each type.

    Args:
        compare: compares one shape, small or large, that it draws; raises AssertionError.
        given: the options of :func:`verbs_of`.
    """
    interpret()
    found: Row = {"shapes": {}, "worst": {}}
    for index in range(given.seed, given.seed + given.shapes):
        _add(found, compare(random.Random(index), index % 10 > 0))
    print(json.dumps(found))


def campaign(
    compare: Callable[[random.Random, bool], Row], programs: Path, given: argparse.Namespace
) -> None:
    """Compare the shapes of the seeds from 0 that are not in the file of results yet, which is written
    as they are done, so that it can be stopped and goes on. Those that are beyond their limit are
    printed, and their seeds listed; the status is then 1.

    Args:
        compare: see :func:`compare_shapes`.
        programs: the file of programs. What other ones gave is thrown away.
        given: ``shapes`` and ``results``.
    """
    interpret()
    name = programs.parent.name
    digest = hashlib.sha256(programs.read_bytes()).hexdigest()[:16]
    path: Path = given.results
    all_found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    found = all_found.get(name, {})
    if found.get("programs") != digest:
        found = {"programs": digest, "next_seed": 0, "shapes": {}, "worst": {}, "beyond": []}
    while found["next_seed"] < given.shapes:
        index = found["next_seed"]
        try:
            _add(found, compare(random.Random(index), index % 10 > 0))
        except AssertionError as error:
            print(f"seed {index}: {error}", flush=True)
            found["beyond"].append(index)
        found["next_seed"] = index + 1
        if index % 20 == 19 or index + 1 == given.shapes:
            # Another campaign may have written to it.
            others = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            path.write_text(json.dumps(others | {name: found}, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(found))
    if found["beyond"]:
        raise SystemExit(f"{len(found['beyond'])} shapes are beyond their limit")


def _add(found: Row, row: Row) -> None:
    """Count the compared shape ``row``."""
    dtype = row["dtype"]
    found["shapes"][dtype] = found["shapes"].get(dtype, 0) + 1
    found["worst"][dtype] = max(found["worst"].get(dtype, 0.0), row["worst"])


def verbs_of(parser: argparse.ArgumentParser) -> Any:
    """The verbs of a script: shapes, a campaign of them, and room for its own."""
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("shapes", help="compare random shapes in Triton's interpreter")
    verb.add_argument("--shapes", type=int, default=100, metavar="N")
    verb.add_argument(
        "--seed", type=int, default=0, help="of the first shape; the next has the next"
    )
    verb = verbs.add_parser(
        "campaign", help="the same up to a number, results in a file; goes on where it stopped"
    )
    verb.add_argument("--shapes", type=int, default=10_000, metavar="N")
    verb.add_argument("--results", type=Path, default=RESULTS, metavar="FILE")
    return verbs
