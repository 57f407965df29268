"""Matrix products: operations in those of a call, and how fast this processor computes a large one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

SIDE = 512
LARGE_PRODUCT = f"{SIDE} x {SIDE} product"
LARGE_OPERATIONS = 2 * SIDE**3
FORMULAS = {str(operation): formula for operation, formula in flop_registry.items()}


class Counting(TorchDispatchMode):
    """Counts the operations in the matrix products that PyTorch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        # PyTorch has a formula for addmm, which holds for addmm_, too; likewise on a CPU.
        name = str(function.overloadpacket).removesuffix("_").replace("_for_cpu", "")
        if name in FORMULAS:
            self.operations += FORMULAS[name](*args, **kwargs, out_val=result)
        return result


def operations(call: Callable[[], object]) -> int:
    """Multiplications and additions in the matrix products of ``call``, its backward pass included.

    Counted are those that PyTorch is asked for; what a loop in C multiplies by itself is not.
    """
    with Counting() as counting:
        call()
    return counting.operations


def large_product(precision: str) -> Callable[[], object]:
    """A large product, for use with float32 products set to ``precision``."""
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    a, b = torch.randn(2, SIDE, SIDE).to(dtype)
    return lambda: torch.mm(a, b)
