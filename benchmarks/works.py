"""The kinds of work that are timed: one call of each, with full memory, in a precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from peers.side import VOCAB_SIZE, Side, Size

PRECISIONS = ("float32", "bfloat16")
"""torch's default, and autocast: each applied to every library in the same way, from outside."""
READING = ("evaluate", "generate")
WORKS = ("train", "attention", *READING)
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


def autocast(precision: str, device: str = "cpu") -> torch.autocast:
    """For a forward pass. Backward runs outside, in the precisions that forward chose."""
    return torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16")


def at(precision: str, work: str) -> torch.autocast:
    """Around many calls of one work. Training enters autocast in each, since it caches weights."""
    return autocast(precision if work in READING else "float32")


def segments(
    size: Size, batch: int, length: int, device: str = "cpu"
) -> Callable[[], tuple[Tensor, Tensor]]:
    """Segments of one random text, repeated: inputs and targets ``[B, T]``."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(VOCAB_SIZE, (batch, 16 * length + 1), generator=generator).to(device)
    at = -1

    def following() -> tuple[Tensor, Tensor]:
        nonlocal at
        at = (at + 1) % 16
        return (
            text[:, at * length : (at + 1) * length],
            text[:, at * length + 1 : (at + 1) * length + 1],
        )

    return following


def prepared(
    side: Side, work: str, precision: str = "float32", device: str = "cpu"
) -> Callable[[], object]:
    """One call of the work, with full memory. For use within :func:`at`, like this function.

    ``device``: where it trains; other work is done on the CPU.
    """
    size = side.size
    side.model.to(device)
    if work == "train":
        side.model.train()
        side.forget(size.batch_size)
        optimizer = side.optimizer()
        text = segments(size, size.batch_size, size.segment_length, device)

        def call() -> None:
            with autocast(precision, torch.device(device).type):
                loss = side.loss(*text())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        for _ in range(full_after(size)):
            call()
        return call

    if work == "attention":
        shape = (size.batch_size, size.segment_length, size.d_model)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
        upstream = torch.randn(shape, generator=torch.Generator().manual_seed(2))
        side.model.train()

        def layer() -> None:
            with autocast(precision):
                y = side.attention(x)
            y.backward(upstream)

        return layer

    side.model.eval()
    if work == "evaluate":
        side.forget(size.batch_size)
        text = segments(size, size.batch_size, size.segment_length)
        for _ in range(full_after(size)):
            side.read(*text())
        return lambda: side.read(*text())

    side.forget(size.generate_batch)
    text = segments(size, size.generate_batch, size.segment_length)
    for _ in range(max(1, full_after(size))):
        logits = side.read(text()[0])
    token = logits[:, -1:].argmax(-1)

    def step() -> None:
        nonlocal token
        token = side.read(token).argmax(-1)

    return step


def full_after(size: Size) -> int:
    """Segments until memory is full, compressed memory at one slot for four tokens."""
    return -(-(size.memory_length + 4 * size.compressed_length) // size.segment_length)


def tokens_per_call(size: Size, work: str) -> int:
    return size.generate_batch if work == "generate" else size.batch_size * size.segment_length


def operations(call: Callable[[], object]) -> int:
    """Multiplications and additions in the matrix products of ``call``, its backward pass included.

    Counted are those that PyTorch is asked for; what a loop in C multiplies by itself is not.
    """
    with Counting() as counting:
        call()
    return counting.operations


def large_product(precision: str) -> Callable[[], object]:
    """A call of a large product."""
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    a, b = torch.randn(2, SIDE, SIDE).to(dtype)
    return lambda: torch.mm(a, b)
