"""A few layers of a run's model, to measure what one segment takes, on text that is made up."""

from __future__ import annotations

import ctypes
import dataclasses
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from memspan.errors import MemspanError
from memspan.memory import Memory
from memspan.models import LanguageModel
from memspan.models.options import BackboneConfig
from memspan.runs.options import RunConfig
from memspan.training.precision import precision_of

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


class CountedProducts(TorchDispatchMode):
    """Counts multiplications and additions in the matrix products that PyTorch is asked for within.

    What a loop in C multiplies by itself is not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of tensors that are made within, while they live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # As in CountedProducts.
        return False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        # Views and what is changed in place share what they were given.
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in {s._cdata: s for s in _storages(result)}.values():
            if storage._cdata not in given:
                self.live += storage.nbytes()
                weakref.finalize(storage, self._freed, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def _freed(self, size: int) -> None:
        self.live -= size


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [t.untyped_storage() for t in tree_leaves(values) if isinstance(t, Tensor)]


def has_fewer_layers(config: RunConfig[BackboneConfig]) -> bool:
    """Whether its architecture has an option for the number of layers."""
    try:
        return shallow(config, 1).model.n_layers == 1
    except (TypeError, ValueError, MemspanError):
        return False


def shallow(config: RunConfig[BackboneConfig], n_layers: int) -> RunConfig[BackboneConfig]:
    """The run with so many layers."""
    if config.model.n_layers == n_layers:
        return config
    options: Any = config.model
    return dataclasses.replace(config, model=dataclasses.replace(options, n_layers=n_layers))


def sampled_layers(config: RunConfig[BackboneConfig]) -> range:
    """Numbers of layers that samples have: 1 and 2, or all where there are no fewer; up to 3 where they
    are recomputed, see :func:`memspan.training.sizes.sampled`."""
    n_layers = config.model.n_layers
    return (
        range(1, min(2 + config.train.recompute, n_layers) + 1)
        if has_fewer_layers(config)
        else range(n_layers, n_layers + 1)
    )


def line(points: Mapping[int, float], at: int) -> float:
    """What a line through the first and last of ``points`` is at ``at``; of one, through zero."""
    (first, low), *rest = sorted(points.items())
    if not rest:
        return low * at / first
    last, high = rest[-1]
    return low + (at - first) * max(0.0, high - low) / (last - first)


def made_up_tokens(vocab_size: int, count: int) -> np.ndarray:
    """Ids ``[count]``, as frequent as words sorted by frequency: like 1 / (id + 1)."""
    rank = np.random.default_rng(1).random(count)
    return np.minimum(np.expm1(rank * np.log1p(vocab_size)), vocab_size - 1).astype(np.uint32)


class Sample:
    """A few layers of a run's model, without an optimiser, for one segment at a time."""

    def __init__(
        self, config: RunConfig[BackboneConfig], vocab_size: int, device: torch.device
    ) -> None:
        self._config, self._vocab_size, self._device = config, vocab_size, device
        self._precision = precision_of(config.train, device)
        self.model = LanguageModel(vocab_size, config.model, config.embedding).to(device)
        self.model.recompute = config.train.recompute

    def operations_per_token(self) -> float:
        """Operations in a forward pass's matrix products.

        Loops in C cannot be counted: architectures that have some are counted by their reference.
        """
        model = self.model.eval()
        implementation = None if model.backbone.compiled_loops() is None else "reference"
        tokens = self._tokens(1)
        with torch.no_grad(), _countable():
            memory = self._memory(1)
            with CountedProducts() as counted:
                model(tokens, memory, targets=tokens, implementation=implementation)
        return counted.operations / tokens.shape[1]

    def peak_bytes(self, rows: int) -> int | None:
        """What a segment's forward and backward take at most, gradients included (None: unknown)."""
        memory = self._memory(rows)
        before = _reset_peak(self._device)
        self._pass(rows, memory)
        peak = _peak(self._device)
        self.model.zero_grad(set_to_none=True)
        return None if before is None or peak is None else peak - before

    def live_bytes(self, rows: int, segments: int) -> int:
        """What forward and backward through so many segments take at most in tensors, without the
        weights' gradients.

        For a model that recomputes its layers: what it keeps of each is so little that holes in the
        heap, which the tensors of many rows do not leave, would be taken for it, or the gradients.
        """
        memory = self._memory(rows)
        hooks = [p.register_post_accumulate_grad_hook(_drop) for p in self.model.parameters()]
        with LiveTensors() as counted:
            self._pass(rows, memory, segments)
        for hook in hooks:
            hook.remove()
        return counted.peak

    def _pass(self, rows: int, memory: Memory, segments: int = 1) -> None:
        model, tokens, losses = self.model.train(), self._tokens(rows), []
        with self._precision.float32_products():
            for _ in range(segments):
                with self._precision.autocast(self._device):
                    output = model(tokens, memory, targets=tokens)
                memory = output.memory
                losses.append(output.loss)
            torch.stack(losses).sum().backward()

    def _memory(self, rows: int) -> Memory:
        """After a segment: the next one displaces what is in it. The same in all rows."""
        return self._read.select([0] * rows)

    @cached_property
    @torch.no_grad()
    def _read(self) -> Memory:
        with self._precision.applied(self._device):
            return self.model(self._tokens(1), self.model.initial_memory(1)).memory

    def _tokens(self, rows: int) -> Tensor:
        length = self._config.train.segment_length
        tokens = made_up_tokens(self._vocab_size, rows * length).astype(np.int64)
        return torch.from_numpy(tokens).view(rows, length).to(self._device)


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


@contextmanager
def _countable() -> Iterator[None]:
    """Have torch compute an LSTM by products, too."""
    with warnings.catch_warnings():
        # About hardware that is not there.
        warnings.filterwarnings("ignore", "TF32 acceleration on top of oneDNN")
        with torch.backends.mkldnn.flags(enabled=False), torch.backends.cudnn.flags(enabled=False):
            yield


def resident_bytes(device: torch.device) -> int | None:
    """What this process holds on ``device`` now (None: unknown)."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    with suppress(OSError, AttributeError, TypeError):
        # What was freed is given back: otherwise it is used again, and not counted.
        ctypes.CDLL(None).malloc_trim(0)
    return _status("VmRSS") if device.type == "cpu" else None


def _reset_peak(device: torch.device) -> int | None:
    """Forget earlier peaks; what is held now (None: that cannot be done here)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return resident_bytes(device)
    held = resident_bytes(device)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return held


def _peak(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _status("VmHWM") if device.type == "cpu" else None


def _status(name: str) -> int | None:
    """A size from what Linux says about this process."""
    with suppress(OSError, ValueError, IndexError):
        status = Path("/proc/self/status").read_text()
        return int(status.split(f"{name}:")[1].split()[0]) * 1024
    return None
