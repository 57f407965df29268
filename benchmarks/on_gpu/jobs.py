"""A job is one call: measured on a device, or counted without one, which is its prediction.

Counted are the operations that PyTorch is asked for, with tensors that have sizes and no numbers: what
each reads, writes and multiplies, and the bytes that are alive. The implementations are those of a GPU.
A prediction is the longer of two times: the host's, which asks for one operation after the other, and
the device's, where an operation takes as long as its bytes or its products.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from memspan import devices
from memspan.native import library
from memspan.ops import relative, relative_kernel
from works import FORMULAS

BYTES_PER_SECOND = 2.8e12
"""Bandwidth of an H100's memory; its data sheet says 3.35e12."""
OPERATIONS_PER_SECOND = {torch.float32: 4e13, torch.bfloat16: 6e14}
"""Multiplications and additions in products, by type; 6.7e13 and 9.9e14 by the data sheet."""
PROGRAM_OPERATIONS_PER_SECOND = {torch.float32: 2e13, torch.bfloat16: 2.5e14}
"""Rates of our Triton programs."""
ATTENTION_OPERATIONS_PER_SECOND = {True: 3.5e14, False: 1.2e14}
"""Rates of torch's attention: flash attention's, and the kernel's that takes a bias."""
START = 2e-6
"""Seconds before an operation of the device does anything."""
ASK = 5e-6
"""Seconds of the host for an operation, autograd's share included."""
ASK_FOR_PROGRAM = 4e-5
"""Seconds of the host for a Triton program, whose launch is Python."""
ASK_FOR_GRAPH = 6e-5
"""Seconds of the host for a call that replays a graph, and what surrounds it."""
ASK_FOR_VIEW = 1.5e-6
"""Seconds of the host for a view."""
Call = Callable[[], object]


class Predicted(NamedTuple):
    """Time and memory of a call on an H100."""

    seconds: float
    """Time on the device."""
    asking: float
    """Seconds of the host."""
    n_bytes: int
    """Most bytes alive at once, beyond those before the call."""

    def row(self) -> dict[str, Any]:
        return {
            "ms": significant(max(self.seconds, self.asking) * 1e3),
            "mib": significant(self.n_bytes / 2**20),
            "limit": "host" if self.asking > self.seconds else "device",
        }


@dataclass(frozen=True)
class Job:
    """Something to measure."""

    what: str
    prepare: Callable[[torch.device], Call]
    """Everything up to the call that is measured."""
    tokens: int = 0
    """Tokens that a call reads (0: it reads none)."""
    programs: Predicted | None = None
    """A prediction, for programs whose operations PyTorch is not asked for."""
    captured: Callable[[torch.device], Call] | None = None
    """The operations of a CUDA graph, which the host asks for at once: counted in its place."""


def synchronise(device: torch.device) -> None:
    """Wait until the device has done its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def measured(job: Job, device: torch.device, rounds: int, seconds: float) -> dict[str, Any]:
    """Milliseconds of a call: the median of ``rounds``, of about so many ``seconds`` each, the lowest
    and the highest; on CUDA, MiB that a call allocates beyond what was there."""
    call = job.prepare(device)

    def turn(calls: int) -> float:
        synchronise(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        synchronise(device)
        return (time.perf_counter() - start) / calls * 1e3

    turn(2)
    once = turn(1)
    row: dict[str, Any] = {}
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        once = turn(1)
        row["mib"] = (torch.cuda.max_memory_allocated(device) - before) / 2**20
    calls = max(1, round(seconds * 1e3 / once))
    times = [turn(calls) for _ in range(rounds)]
    row |= {"ms": median(times), "low": min(times), "high": max(times)}
    if job.tokens:
        row["tokens_per_second"] = job.tokens / row["ms"] * 1e3
    return row


# ----- Predictions


class Counting(TorchDispatchMode):
    """Counts operations, their times, and the bytes that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.views = 0
        self.programs = 0
        self.seconds = 0.0
        self.peak = 0
        self._alive = 0
        self._storages: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        kwargs = kwargs or {}
        if function is torch.ops.aten._local_scalar_dense.default:
            # A number that is looked at, of which there is none.
            return 0
        result = function(*args, **kwargs)
        if function.namespace == "prim":
            # A question such as a tensor's device, which asks for nothing.
            return result
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        for t in made:
            self._note(t.untyped_storage())
        name = str(function.overloadpacket).removeprefix("aten.")
        if function.is_view or name.startswith(("detach", "empty", "_unsafe_view", "new_empty")):
            self.views += 1
            return result
        self.operations += 1
        n_bytes = sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in given + made)
        whole = str(function.overloadpacket).removesuffix("_").replace("_for_cpu", "")
        seconds = n_bytes / BYTES_PER_SECOND
        if whole in FORMULAS:
            rate = OPERATIONS_PER_SECOND.get(made[0].dtype, OPERATIONS_PER_SECOND[torch.float32])
            if "attention" in whole:
                rate = min(rate, ATTENTION_OPERATIONS_PER_SECOND["flash" in whole])
            products: int = FORMULAS[whole](*args, **kwargs, out_val=result)
            seconds = max(seconds, products / rate)
        self.seconds += START + seconds
        return result

    def add_program(self, given: tuple[Any, ...], products: float) -> None:
        """A Triton program with these arguments, which multiplies and adds so often."""
        tensors = [t for t in given if isinstance(t, Tensor)]
        rate = PROGRAM_OPERATIONS_PER_SECOND[tensors[0].dtype]
        n_bytes = sum(t.nbytes for t in tensors)
        self.programs += 1
        self.seconds += START + max(n_bytes / BYTES_PER_SECOND, products / rate)

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = storage.nbytes()
            self._alive += storage.nbytes()
            self.peak = max(self.peak, self._alive)
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._alive -= self._storages.pop(key)


class Unlaunched:
    """A program of relative attention that is counted in place of being launched."""

    def __init__(self, products: int) -> None:
        self.products = products
        """Products of queries or their gradients with keys or values."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._launch

    def _launch(self, *given: Any, **_: Any) -> None:
        q, k = given[:2]
        n_queries = q.shape[2]
        n_keys = k.shape[2]
        # Half of the segment's own part is in the future.
        products = 2 * self.products * q.numel() * (n_keys - n_queries / 2)
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, Counting):
                mode.add_program(given, products)


def gpu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """``scaled_dot_product_attention`` by the kernels that a GPU has, where it is asked for it."""
    if attn_mask is None and q.dtype != torch.float32:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(q, k, v, dropout_p, is_causal, scale=scale)[0]
    if attn_mask is not None:
        attn_mask = attn_mask.to(q.dtype).expand(*q.shape[:3], k.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(q, k, v, attn_mask, True, dropout_p, is_causal, scale=scale)[0]


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """The implementations that a GPU gets, for tensors without numbers."""
    with ExitStack() as stack:
        for module, name, instead in (
            (library, "available", lambda *_: False),
            (devices, "can_look", lambda _: False),
            (relative, "CACHE_BYTES", 1 << 60),
            (torch.nn.functional, "scaled_dot_product_attention", gpu_attention),
        ):
            stack.enter_context(mock.patch.object(module, name, instead))
        if find_spec("triton") is not None:
            from memspan.ops.relative_kernel import kernel

            found = mock.patch.object(relative_kernel, "obstacle", return_value=None)
            stack.enter_context(found)
            for name, products in (("forward", 2), ("backward_queries", 3), ("backward_keys", 4)):
                stack.enter_context(mock.patch.object(kernel, name, Unlaunched(products)))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


def predicted(job: Job) -> dict[str, Any]:
    """Milliseconds and MiB of a call on an H100."""
    if job.programs is not None:
        return job.programs.row()
    with as_on_a_gpu():
        with Counting():
            call = (job.captured or job.prepare)(torch.device("cpu"))
            # The first call makes what the next ones find: an optimiser's state, a memory.
            call()
        with Counting() as counting:
            call()
    asking = counting.operations * ASK + counting.views * ASK_FOR_VIEW
    asking += counting.programs * ASK_FOR_PROGRAM
    if job.captured is not None:
        asking = ASK_FOR_GRAPH
    return Predicted(counting.seconds, asking, counting.peak).row()


def significant(x: float) -> float:
    """``x`` to three digits."""
    return float(f"{x:.3g}") if math.isfinite(x) else x


def one_line(error: BaseException) -> str:
    """The kind of an error and the first line of its message."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
