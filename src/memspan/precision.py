"""The precision of matrix products: bfloat16 or float32, and how exactly float32 is multiplied.

What ``auto`` means is never measured at run time: a run computes the same on every processor. Global
settings of torch are restored when a ``with`` block ends.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

from memspan.calls import Options
from memspan.checks import check_types, refuse_contradictory_precision
from memspan.errors import MemspanError


@dataclass(frozen=True)
class Precision(Options):
    """Precision of matrix products."""

    products: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: torch's autocast, except for what must not be rounded, such as sums in memory."""
    matmul: Literal["highest", "high", "medium"] = "highest"
    """Precision of float32 products, as in ``torch.set_float32_matmul_precision``."""

    def __post_init__(self) -> None:
        check_types(self)
        refuse_contradictory_precision(self.products, self.matmul)

    def __str__(self) -> str:
        if self.products == "bfloat16":
            return "bfloat16"
        return f"float32 (matmul precision {self.matmul})"

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """For forward passes on ``device``; backward passes compute as their forward pass did."""
        enabled = self.products == "bfloat16"
        if not enabled and not torch.is_autocast_enabled(device.type):
            # Entering autocast would cost time for every token that is read.
            return nullcontext()
        return torch.autocast(device.type, torch.bfloat16, enabled=enabled)

    def float32_products(self) -> AbstractContextManager[None]:
        """Apply ``matmul`` to forward and backward passes, then restore torch's setting."""
        # Usually there is nothing to set, and readers enter this for every token.
        same = float32_matmul_precision() == self.matmul
        return nullcontext() if same else self._set_float32_products()

    @contextmanager
    def _set_float32_products(self) -> Iterator[None]:
        libraries = [(library, library.fp32_precision) for library in _libraries()]
        for library, _ in libraries:
            # torch refuses to report its own setting if a library's contradicts it.
            library.fp32_precision = "ieee"
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(self.matmul)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)
            for library, setting in libraries:
                library.fp32_precision = setting

    def applied(self, device: torch.device) -> AbstractContextManager[object]:
        """Autocast and ``matmul``, for passes without gradients."""
        if float32_matmul_precision() == self.matmul:
            return self.autocast(device)
        return self._both(device)

    @contextmanager
    def _both(self, device: torch.device) -> Iterator[None]:
        with self._set_float32_products(), self.autocast(device):
            yield

    def notices(self, device: torch.device, float32_part: str | None) -> list[str]:
        """Lines for the user about this choice on ``device``; ``float32_part``: what the model computes
        in float32 regardless, ``LanguageModel.float32_part()``."""
        if self.products != "bfloat16":
            return []
        lines = []
        if device.type == "cpu" and not multiplies_bfloat16():
            lines.append(
                "PyTorch has no fast bfloat16 products for this processor (on x86 they need AVX-512): "
                "they may take 40 to 500 times as long as float32's (PyTorch issue 146508)"
            )
        if float32_part is not None:
            lines.append(f"bfloat16 speeds up other products only: {float32_part} in float32")
        return lines


AUTOMATIC = Precision("float32", "highest")
"""The meaning of ``auto`` in training, on every device.

Let it depend on the device only with evidence from such a one in benchmarks/results: learning curves of
three seeds, as good as float32's."""


def resolve(
    precision: str, matmul_precision: str, auto: Precision, device: torch.device
) -> Precision:
    """The precision that these options choose on ``device``; ``auto`` fills in what they leave open."""
    products: Any = auto.products if precision == "auto" else precision
    matmul: Any = matmul_precision
    if matmul == "auto":
        matmul = auto.matmul if products == "float32" else "highest"
    chosen = Precision(products, matmul)
    try:
        with warnings.catch_warnings():
            # Some devices only warn, and compute in float32.
            warnings.simplefilter("error")
            chosen.autocast(device)
    except (RuntimeError, UserWarning):
        raise MemspanError(f"{device} has no bfloat16: use precision float32") from None
    return chosen


def multiplies_bfloat16() -> bool:
    """Check that PyTorch has fast bfloat16 products for this processor; else it uses slow loops."""
    known = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return known is not None and bool(known())


def float32_matmul_precision() -> str | None:
    """torch's setting; None where its libraries were set individually."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _libraries() -> list[Any]:
    """The libraries with their own settings in newer releases of torch."""
    found = [getattr(torch.backends, name, None) for name in ("cuda", "mkldnn")]
    products = [getattr(library, "matmul", None) for library in found]
    return [library for library in products if hasattr(library, "fp32_precision")]
