"""Matrix products: operations in those of a call, and how fast this processor computes a large one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
# Missing from torch's formulas: the same operations by other names.
SAME_AS = {
    aten.addmm_: aten.addmm,
    aten.baddbmm_: aten.baddbmm,
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        aten._scaled_dot_product_flash_attention_backward
    ),
}
SIDE = 512
LARGE_PRODUCT = f"{SIDE} x {SIDE} product"
LARGE_OPERATIONS = 2 * SIDE**3


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled in here, and loading the compiler takes seconds.
        return False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        packet = SAME_AS.get(function.overloadpacket, function.overloadpacket)
        if packet in flop_registry:
            self.operations += flop_registry[packet](*args, **(kwargs or {}), out_val=result)
        return result


def operations(call: Callable[[], object]) -> int:
    """Multiplications and additions in the matrix products of ``call``, its backward pass included.

    Counted are those that PyTorch is asked for; what a loop in C multiplies by itself is not.
    """
    with _Counting() as counting:
        call()
    return counting.operations


def large_product(precision: str) -> Callable[[], object]:
    """A large product, for use with float32 products set to ``precision``."""
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    a, b = torch.randn(2, SIDE, SIDE).to(dtype)
    return lambda: torch.mm(a, b)
