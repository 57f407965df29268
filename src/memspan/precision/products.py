"""The precision of matrix products: bfloat16 or float32, and how exactly float32 is multiplied.

What an option ``auto`` means is decided by a table, never by a measurement on the spot: a run computes
the same on every processor of a kind. Nothing global stays changed: settings hold inside ``with``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

from memspan.checks import check_types
from memspan.errors import MemspanError
from memspan.precision.options import refuse_contradictory_precision


@dataclass(frozen=True)
class Precision:
    """How matrix products are computed."""

    products: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: by torch's autocast; what must not be rounded, such as sums in memory, is float32."""
    matmul: Literal["highest", "high", "medium"] = "highest"
    """How products of float32 are computed, as in ``torch.set_float32_matmul_precision``."""

    def __post_init__(self) -> None:
        check_types(self)
        refuse_contradictory_precision(self.products, self.matmul)

    def __str__(self) -> str:
        if self.products == "bfloat16":
            return "bfloat16"
        return f"float32 (matmul precision {self.matmul})"

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """For forward passes on ``device``; backward passes compute as their forward did."""
        enabled = self.products == "bfloat16"
        if not enabled and not torch.is_autocast_enabled(device.type):
            # For every token that is read it would take time.
            return nullcontext()
        return torch.autocast(device.type, torch.bfloat16, enabled=enabled)

    @contextmanager
    def float32_products(self) -> Iterator[None]:
        """For forward and backward passes. What torch's setting was before holds again afterwards."""
        if float32_matmul_precision() == self.matmul:
            yield
            return
        libraries = [(library, library.fp32_precision) for library in _libraries()]
        for library, _ in libraries:
            # Where a library's setting and torch's own contradict, torch refuses to say its own.
            library.fp32_precision = "ieee"
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(self.matmul)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)
            for library, setting in libraries:
                library.fp32_precision = setting

    @contextmanager
    def applied(self, device: torch.device) -> Iterator[None]:
        """Both, for passes without gradients."""
        with self.float32_products(), self.autocast(device):
            yield

    def notices(self, device: torch.device, float32_part: str | None) -> list[str]:
        """What to tell whoever chose this, one line each.

        Args:
            device: where it computes.
            float32_part: what the model computes in float32 all the same,
                ``LanguageModel.float32_part()``.
        """
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


AUTOMATIC = {
    "cuda": Precision("bfloat16"),
    "AVX512": Precision("float32", "highest"),
    "AVX2": Precision("float32", "highest"),
}
"""What ``auto`` is in training: by device, for the CPU by its ``get_cpu_capability()``.

Others compute in float32, highest. A row of a processor changes only with evidence from such a
processor in benchmarks/results: learning curves of three seeds, as good as float32's."""


def automatic(device: torch.device) -> Precision:
    """What ``auto`` is in training on ``device``."""
    cpu = device.type == "cpu"
    kind = torch.backends.cpu.get_cpu_capability() if cpu else device.type
    return AUTOMATIC.get(kind, Precision())


def resolve(
    precision: str, matmul_precision: str, auto: Precision, device: torch.device
) -> Precision:
    """The options of these names on ``device``, with ``auto`` for what they leave open.

    Raises:
        MemspanError: they contradict one another; the device has no bfloat16.
    """
    products: Any = auto.products if precision == "auto" else precision
    matmul: Any = matmul_precision
    if matmul == "auto":
        matmul = auto.matmul if products == "float32" else "highest"
    chosen = Precision(products, matmul)
    if chosen.products == "bfloat16":
        _refuse_without_bfloat16(chosen, device)
    return chosen


def recorded_precision(environment: Any) -> Precision | None:
    """What a checkpoint says its run used, for runs whose options may still say ``auto``: those begun
    before their precision was written there. None: it does not say."""
    found = environment if isinstance(environment, dict) else {}
    if found.get("precision") == "bfloat16":
        return Precision("bfloat16")
    try:
        return Precision(found.get("precision"), found.get("float32 products"))  # type: ignore
    except MemspanError:
        return None


def _refuse_without_bfloat16(precision: Precision, device: torch.device) -> None:
    try:
        with warnings.catch_warnings():
            # Some devices would only warn, and go on in float32.
            warnings.simplefilter("error")
            precision.autocast(device)
    except (RuntimeError, UserWarning):
        raise MemspanError(f"{device} has no bfloat16: use precision float32") from None


def multiplies_bfloat16() -> bool:
    """Whether PyTorch's library of products takes bfloat16 on this processor; else slow loops do."""
    known = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return known is not None and bool(known())


def float32_matmul_precision() -> str | None:
    """torch's setting; None where its libraries were given others one by one."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _libraries() -> list[Any]:
    """Where newer releases of torch keep the setting, library by library."""
    found = [getattr(torch.backends, name, None) for name in ("cuda", "mkldnn")]
    products = [getattr(library, "matmul", None) for library in found]
    return [library for library in products if hasattr(library, "fp32_precision")]
