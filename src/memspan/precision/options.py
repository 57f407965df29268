"""Names of precisions, and which can be combined."""

from __future__ import annotations

from typing import Literal

from memspan.errors import MemspanError

Products = Literal["auto", "float32", "bfloat16"]
MatmulPrecision = Literal["auto", "highest", "high", "medium"]


def refuse_contradictory_precision(precision: str, matmul_precision: str) -> None:
    """Raise :class:`MemspanError` if both options would round products.

    Under bfloat16, what stays in float32, such as recurrences over a memory, must not be rounded.
    """
    if precision == "bfloat16" and matmul_precision in ("high", "medium"):
        raise MemspanError(
            f"with precision bfloat16, matmul_precision {matmul_precision} would round what must stay "
            "float32: use precision float32, or matmul_precision highest"
        )
