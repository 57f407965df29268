"""Matrix products: operations in those of a call, and how fast this processor computes a large one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from memspan.training.sizes import Tally

SIDE = 512
LARGE_PRODUCT = f"{SIDE} x {SIDE} product"
LARGE_OPERATIONS = 2 * SIDE**3


def operations(call: Callable[[], object]) -> int:
    """Multiplications and additions in the matrix products of ``call``, its backward pass included.

    Counted are those that PyTorch is asked for; what a loop in C multiplies by itself is not.
    """
    with Tally() as counting:
        call()
    return counting.operations


def large_product(precision: str) -> Callable[[], object]:
    """A large product, for use with float32 products set to ``precision``."""
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    a, b = torch.randn(2, SIDE, SIDE).to(dtype)
    return lambda: torch.mm(a, b)
