"""Readers of a backbone: their interface, and the one that serves every architecture."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor, nn

from memspan.errors import MemspanError
from memspan.memory import Memory
from memspan.models.inputs import check_step, check_vectors, refuse_not_finite
from memspan.models.output import BackboneOutput
from memspan.models.remedies import refuse_with_remedy

if TYPE_CHECKING:
    from memspan.models.protocol import Backbone

M = TypeVar("M", bound=Memory)
M_co = TypeVar("M_co", bound=Memory, covariant=True)
F = TypeVar("F", bound=Callable[..., Any])


@runtime_checkable
class BackboneReader(Protocol[M_co]):
    """A position in a stream of vectors; its results equal the backbone's in evaluation mode."""

    @property
    def memory(self) -> M_co:
        """The memory after all that was read: a value, which reading on does not change."""
        ...

    def select(self, rows: Tensor | list[int]) -> M_co: ...

    def reset(self, mask: Tensor | list[bool]) -> None: ...

    def replace(self, rows: Tensor | list[int], memory: Memory) -> None: ...

    def read(self, x: Tensor, starts: Tensor | None = None) -> Tensor:
        """``[B, T, D] -> [B, T, D]``, the backbone's output; the reader then stands after ``x``.

        ``starts``: bool ``[B, T]``, true where a document begins (None: nowhere).

        Raises:
            NonFiniteError: as in :meth:`step`.
            MemspanError: ``x`` has other rows or another width, or is not of the weights' type and on
                their device. The reader stays as it was.
        """
        ...

    def step(self, x: Tensor) -> Tensor:
        """One vector of every row, ``[B, D] -> [B, D]``, as an agent acts in ``B`` environments: the
        same as :meth:`read` of one token, without documents. Nothing waits for the device.

        Raises:
            NonFiniteError: vectors of some rows, which the message names, are not finite. On a GPU they
                are read, and spoil their own rows until these are reset.
            MemspanError: ``x`` is not as described in :meth:`read`. Either way the reader stays as it
                was.
        """
        ...


def not_copied(reader: object, protocol: object) -> NoReturn:
    """A reader's ``__reduce_ex__``, for copies and pickles: they would share buffers, or lack them.

    Raises:
        MemspanError: says what to copy instead.
    """
    raise MemspanError(
        "a reader cannot be copied or pickled: take its memory, a value, and make another reader "
        "with model.reader(reader.memory)"
    )


def by_one_thread(method: F) -> F:
    """Run a reader's method without gradients; refuse it while another thread is in such a method of
    the same reader, whose lock is ``in_use``.

    ``torch.no_grad`` is left out where gradients are off already, as in most rollouts.
    """
    guarded = torch.no_grad()(method)

    @wraps(method)
    def chosen(self: Any, *args: Any, **options: Any) -> Any:
        if not self.in_use.acquire(False):
            raise MemspanError(
                "another thread is using this reader: give each its own, "
                "model.reader(reader.memory), or use it under a lock"
            )
        try:
            run = guarded if torch.is_grad_enabled() else method
            return run(self, *args, **options)
        finally:
            self.in_use.release()

    return cast(F, chosen)


class VectorReader(ABC):
    """Checks what a reader is given, and reads it without gradients."""

    def __init__(self, backbone: Backbone[Any], rows: int) -> None:
        self.in_use = threading.RLock()
        self._reads = backbone
        # The width, a weight and the number of rows, which the checks compare vectors with.
        self._expected = backbone.config.d_model, next(backbone.parameters()), rows

    @abstractmethod
    def _read_vectors(self, x: Tensor, starts: Tensor | None) -> Tensor:
        """See :meth:`BackboneReader.read`; the arguments have been checked."""

    @by_one_thread
    def read(self, x: Tensor, starts: Tensor | None = None) -> Tensor:
        """See :meth:`BackboneReader.read`."""
        check_vectors(x, *self._expected, starts)
        refuse_not_finite(x)
        return self._read_all(x, starts)

    @by_one_thread
    def read_embedded(self, x: Tensor, starts: Tensor | None = None) -> Tensor:
        """The same of tokens' embeddings, which are finite if weights are: to look takes time."""
        check_vectors(x, *self._expected, starts)
        return self._read_all(x, starts)

    def _read_all(self, x: Tensor, starts: Tensor | None) -> Tensor:
        try:
            return self._read_vectors(x, starts) if x.numel() else x
        except RuntimeError as error:
            refuse_with_remedy(error, self._reads, x)
            raise

    @by_one_thread
    def step(self, x: Tensor) -> Tensor:
        """See :meth:`BackboneReader.step`."""
        check_step(x, *self._expected)
        try:
            return self._step_on(x)
        except RuntimeError as error:
            refuse_with_remedy(error, self._reads, x[:, None])
            raise

    def _step_on(self, x: Tensor) -> Tensor:
        # Indexing takes longer.
        return self._read_vectors(x.unsqueeze(1), None).squeeze(1)


class MemoryReader(Generic[M]):
    """Base class of readers whose only state is their memory."""

    __reduce_ex__ = not_copied

    def __init__(self, memory: M) -> None:
        self.in_use = threading.RLock()
        self.memory = memory

    def select(self, rows: Tensor | list[int]) -> M:
        return self.memory.select(rows)

    @by_one_thread
    def reset(self, mask: Tensor | list[bool]) -> None:
        self.memory = self.memory.reset(mask)

    @by_one_thread
    def replace(self, rows: Tensor | list[int], memory: Memory) -> None:
        self.memory = self.memory.replace(rows, memory)


class PassReader(VectorReader, MemoryReader[M]):
    """The reader of any backbone, whatever its modules are: whole passes, nothing kept beside the
    memory.

    ``options``: more arguments of the backbone's ``forward``.
    """

    def __init__(self, backbone: Backbone[M], memory: M, **options: Any) -> None:
        VectorReader.__init__(self, backbone, len(memory.tokens_seen))
        MemoryReader.__init__(self, memory)
        self._backbone = backbone
        self._options = options

    def _read_vectors(self, x: Tensor, starts: Tensor | None) -> Tensor:
        # Past the backbone's own checks, which take a tenth of a token's time: its memory is known.
        output: BackboneOutput[M] = nn.Module.__call__(
            self._backbone, x, self.memory, starts=starts, **self._options
        )
        self.memory = output.memory
        return output.hidden
