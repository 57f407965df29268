"""The precisions of matrix products that are measured, and those that a processor benefits from.

``float32`` is torch's default; ``medium`` is ``torch.set_float32_matmul_precision("medium")``;
``bfloat16`` is autocast, its remaining float32 products as by default. Each is applied to every library
in the same way, from outside.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from memspan.precision import multiplies_bfloat16

PRECISIONS = ("float32", "medium", "bfloat16")


@dataclass(frozen=True)
class Processor:
    """The properties that decide how fast its matrix products are."""

    capability: str
    """The instruction set that torch selects its own kernels for, such as AVX2."""
    multiplies_bfloat16: bool
    """Whether torch's library of products supports bfloat16: AVX-512, or bfloat16 instructions."""
    flags: tuple[str, ...]
    """Its vector and matrix instructions, as Linux names them; none where unknown."""

    @property
    def precisions(self) -> tuple[str, ...]:
        """Those that it benefits from.

        Where that library does not support bfloat16, ``medium`` changes nothing, and products in
        bfloat16 are many times slower than in float32.
        """
        return PRECISIONS if self.multiplies_bfloat16 else ("float32",)


def processor() -> Processor:
    """This machine's."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    # "flags" on x86, "Features" on ARM.
    named = [line for line in lines if re.match(r"(flags|Features)\s*:", line)]
    flags = named[0].split(":", 1)[1].split() if named else []
    vector = sorted(flag for flag in flags if re.search("avx|amx|bf16|fma|sve|asimd", flag))
    return Processor(
        capability=torch.backends.cpu.get_cpu_capability(),
        multiplies_bfloat16=multiplies_bfloat16(),
        flags=tuple(vector),
    )


@contextmanager
def products_in(precision: str) -> Iterator[None]:
    """torch's setting for float32 products; restored."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if precision == "medium" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def autocast(precision: str, device: str = "cpu") -> torch.autocast:
    """For a forward pass. Backward runs outside, in the precisions that forward chose."""
    return torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16")
