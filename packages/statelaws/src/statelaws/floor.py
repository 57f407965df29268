"""The floor: the effect of the last place of a model's weights on its outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from statelaws.states import stored

PERTURBATIONS = 8
FACTOR = 20
"""A law is broken where numbers differ by more than this many floors."""
CLOSE = 5
"""Below, they are equal; between, it cannot be told."""
POWER = 100
"""A case shows something only if a wrong state differs by more than this many times that."""
COARSE_FACTOR = 2
"""In place of :data:`FACTOR` where weights have two bytes: there a unit in the last place is large, and
changes outputs more than the rounding of everything that is computed. Such a finding must recur
with other inputs."""
COARSE_POWER = 1
"""In place of :data:`POWER` where weights have two bytes; needed in at least one case of each law."""

IdleBits = Mapping[torch.dtype, int]
"""Numbers of last bits of weights and outputs that do not count, by type."""
_FRACTIONS = {torch.bfloat16: 7, torch.float16: 10}
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution")
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Reference:
    """The difference that the outputs of a case may have."""

    deviation: float
    floor: float
    """The floor, relative to the deviation."""
    coarse: bool = False
    """True if weights, or products as under autocast, have two bytes."""

    @property
    def threshold(self) -> float:
        """The difference above which a law is broken."""
        return (COARSE_FACTOR if self.coarse else FACTOR) * self.floor

    @property
    def needed(self) -> float:
        """The difference that a wrong state must make for a case to show anything."""
        return (COARSE_POWER if self.coarse else POWER) * self.threshold


def difference(expected: Tensor, seen: Tensor) -> float:
    """The largest difference; infinite if only one of two values is NaN, or the sizes differ."""
    if expected.shape != seen.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    expected, seen = (each.detach().to("cpu", torch.float64) for each in (expected, seen))
    same = (expected == seen) | (expected.isnan() & seen.isnan())
    apart = torch.where(same, 0.0, (expected - seen).abs())
    return apart.nan_to_num(nan=float("inf"), posinf=float("inf")).max().item()


def reference(
    compute: Callable[[], Tensor], module: nn.Module, seed: int, bits: IdleBits
) -> Reference:
    """The result of ``compute``, and its largest change over random perturbations of the weights.

    It draws the same random numbers each time. Weights are restored bit for bit. ``bits``: the number
    of the weights' last bits that do not count (:func:`idle_bits`).
    """
    outputs = _again(compute, seed)
    least = exact(outputs)
    if math.isnan(least.deviation):
        return least
    # State kept from earlier calls, which is what a law tests, must not set the floor.
    pure = difference(outputs, _again(compute, seed)) <= FACTOR * rounding(outputs)
    change = _change(compute, outputs, module, seed, bits) if pure else 0.0
    floor = max(change, rounding(outputs, bits)) / least.deviation
    return Reference(least.deviation, floor, is_coarse(module, bits))


def is_coarse(module: nn.Module, bits: IdleBits) -> bool:
    """True if weights, or products as under autocast, have two bytes."""
    return torch.float32 in bits or any(
        p.is_floating_point() and p.element_size() <= 2 for p in module.parameters()
    )


def exact(outputs: Tensor) -> Reference:
    """A reference for outputs that must be equal up to their rounding. Numbers are NaN if the outputs
    are all the same, or not finite."""
    finite = outputs[outputs.isfinite()].double()
    deviation = finite.std(correction=0).item() if len(finite) else 0.0
    if not deviation > 0:
        return Reference(math.nan, math.nan)
    return Reference(deviation, rounding(outputs) / deviation)


def idle_bits(compute: Callable[[], Tensor], module: nn.Module, seed: int) -> IdleBits:
    """Number of the weights' last bits that do not count, as the model computes in a shorter type:
    products of two bytes, as under autocast, are seen; where part of a float64 model is of float32,
    larger perturbations change outputs in proportion, unless they are rounded inside."""
    products: Any = _Products()  # type: ignore[no-untyped-call]
    with products:
        outputs = _again(compute, seed)
    if products.bits is not None:
        return {torch.float64: 52 - products.bits, torch.float32: 23 - products.bits}
    if not any(weight.dtype == torch.float64 for weight in module.parameters()):
        return {}
    if outputs.dtype != torch.float64:
        # Gradients are of the weights' type all the same.
        return {torch.float64: 52 - 23}
    least = max(_change(compute, outputs, module, seed, {}), rounding(outputs))
    changes = {
        bits: _change(compute, outputs, module, seed, {torch.float64: bits})
        for bits in (12, 16, 20)
    }
    smooth = all(change <= 16 * least * 2**bits for bits, change in changes.items())
    return {} if smooth else {torch.float64: 52 - 23}


class _Products(TorchDispatchMode):
    """Notices matrix products whose results have two bytes."""

    bits: int | None = None
    """Bits of their fractions: 7 of bfloat16, 10 of float16."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else torch imports its compiler, which takes longer than all laws of a small model.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        dtype = getattr(result, "dtype", None)
        if dtype in _FRACTIONS and func.overloadpacket.__name__ in _PRODUCTS:
            self.bits = min(self.bits or 23, _FRACTIONS[dtype])
        return result


def _again(compute: Callable[[], Tensor], seed: int) -> Tensor:
    torch.manual_seed(seed)
    return compute().detach().clone()


def _change(
    compute: Callable[[], Tensor], outputs: Tensor, module: nn.Module, seed: int, bits: IdleBits
) -> float:
    generator = torch.Generator().manual_seed(seed)
    apart = 0.0
    for _ in range(PERTURBATIONS):
        with perturbed(module, generator, bits):
            apart = max(apart, difference(outputs, _again(compute, seed)))
    return apart


def rounding(outputs: Tensor, bits: IdleBits = MappingProxyType({})) -> float:
    """One unit in the last place of the largest output."""
    finite = outputs[outputs.isfinite()]
    unit = 2 ** bits.get(outputs.dtype, 0) * torch.finfo(outputs.dtype).eps
    return unit * finite.abs().max().item() if len(finite) else 0.0


@contextmanager
def perturbed(
    module: nn.Module, generator: torch.Generator, bits: IdleBits = MappingProxyType({})
) -> Iterator[None]:
    """Every weight a unit in the last place that counts larger or smaller, at random."""
    weights = [stored(p) for p in module.parameters() if p.is_floating_point()]
    weights = [weight for weight in weights if weight.element_size() in _INTEGERS]
    before = [weight.detach().clone() for weight in weights]
    try:
        with torch.no_grad():
            for weight in weights:
                weight.copy_(_next(weight, generator, bits))
        yield
    finally:
        with torch.no_grad():
            for weight, value in zip(weights, before, strict=True):
                weight.copy_(value)


def _next(weight: Tensor, generator: torch.Generator, bits: IdleBits) -> Tensor:
    """Read as integers, floating-point numbers of one sign are in order."""
    up = torch.randint(2, weight.shape, generator=generator).to(weight.device)
    step = (2 * up - 1) * 2 ** bits.get(weight.dtype, 0)
    # Values that are not finite stay; zero and its neighbours can only be made larger.
    finfo = torch.finfo(weight.dtype)
    step = torch.where(weight.abs() < finfo.max / 2, step, torch.zeros_like(step))
    step = torch.where(weight.abs() < finfo.tiny * 2, step.abs(), step)
    integers = _INTEGERS[weight.element_size()]
    return (weight.detach().contiguous().view(integers) + step.to(integers)).view(weight.dtype)
