"""The interface of a backbone: what an architecture implements, and what it may leave as it is.

Required are ``memory_type``, its ``row_sizes``, and ``read_piece`` or, where results depend on the
cuts, ``forward``; ``initial_memory`` where sizes are the memory's own. Everything else has a default,
the reader included: an architecture needs one of its own only to stream faster than by whole passes.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import IO, Any, Generic, NoReturn, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor, nn

from memspan.errors import MemspanError, counted
from memspan.memory import Memory
from memspan.models.inputs import (
    check_memory,
    check_step,
    check_vectors,
    own_lengths,
    refuse_not_finite,
)
from memspan.models.options import BackboneConfig
from memspan.models.output import BackboneOutput
from memspan.models.packing import Schema, has_versions, is_exactly
from memspan.models.recomputation import recomputed
from memspan.models.segments import Padding, read_in_pieces, read_whole
from memspan.models.sizes import refuse_oversized_model, refuse_too_long
from memspan.ops.implementations import refuse_unknown_implementation
from memspan.trees import constant, recordable

M = TypeVar("M", bound=Memory)
R = TypeVar("R")
M_co = TypeVar("M_co", bound=Memory, covariant=True)


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


@dataclass(frozen=True)
class TransferableWeights:
    """Weights that another architecture can take from one of softmax attention, by neutral names."""

    n_heads: int
    head_width: int
    layers: list[dict[str, Tensor]]
    """For each layer ``query.weight``, ``key.weight``, ``value.weight``, ``output.weight`` and their
    biases; ``feed_forward.inner.*``, ``feed_forward.outer.*``, ``attention_norm.*`` and
    ``feed_forward_norm.*``. The score of a key at the n-th distance asked for is
    ``(q + content_bias) . k + q . position_keys[n] + position_scores[n]``, with
    ``content_bias [H, K]``, ``position_keys [P, H, K]``, ``position_scores [P, H]``."""
    final_norm: Mapping[str, Tensor]
    """``weight`` and ``bias`` of the norm after the last layer, if there is one."""


@dataclass(frozen=True)
class AttentionWeights:
    """Attention of a segment's tokens, layer by layer."""

    layers: list[Tensor]
    """One per layer, ``[B, H, T, S]``: a token's weights sum to 1, or to 0 where it sees nothing."""
    distances: Tensor
    """Tokens from each token back to what a key stands for, float ``[B or 1, T or 1, S]``."""
    kinds: dict[str, Tensor]
    """Parts of the memory, and the segment where it is apart: which keys belong to each, bool
    ``[B or 1, S]``."""


@dataclass(frozen=True)
class WriteRetention:
    """Fate of the values that are written to matrices."""

    kept: Tensor
    """The share of the first token's value that its key reads after 0, 1, 2, ... further tokens,
    ``[L, T]``: mean over rows and heads."""
    effective_rank: Tensor
    """``[L]``: the exponential of the entropy of the matrices' singular values after the last token
    (Roy and Vetterli 2007), mean over rows and heads."""
    full_rank: int
    """The largest rank that it can have."""


def not_replicated(module: nn.Module) -> NoReturn:
    """Takes the place of ``_replicate_for_data_parallel``: the copies of ``nn.DataParallel`` have no
    parameters, and it can neither scatter a memory nor gather an output.

    Raises:
        MemspanError: says what to use instead.
    """
    raise MemspanError(
        "nn.DataParallel cannot carry a memory: use torch.nn.parallel.DistributedDataParallel, in a "
        "process for each GPU, or memspan train --nproc"
    )


class Backbone(nn.Module, Generic[M]):
    """A stack over vectors: ``[B, T, D]`` and a memory in, ``[B, T, D]`` and a memory out."""

    config: BackboneConfig
    memory_type: type[M]
    """A frozen dataclass, see :class:`memspan.memory.Memory`."""
    layers: nn.ModuleList
    implementations: tuple[str, ...] = ("reference",)
    """Values that ``implementation`` may have. Some cannot run with every option or on every machine:
    asking for one is then an error."""
    tables: tuple[str, ...] = ()
    """Last parts of the names of parameters with one row per distance, nearest first. A longer table
    means the same in its first rows."""
    schema: Schema | None = None
    """The modules for which this architecture's reader was written, and functions that take a whole
    segment through all layers (None: there are none)."""
    _replicate_for_data_parallel = not_replicated
    knows_documents: bool = False
    """True if :meth:`read_piece` takes any segment, with its :class:`Documents` or None as
    ``documents``: one graph of ``torch.compile``. Otherwise it is called for each document."""
    recompute: bool = False
    """True if each layer keeps only its inputs for backward, and is computed again there
    (activation checkpointing): less memory for more time, and the same numbers bit for bit."""

    def __init__(self, config: BackboneConfig) -> None:
        """Keep the options, and refuse sizes that no machine holds."""
        super().__init__()
        refuse_oversized_model(config)
        constant(type(config))
        self.config = config

    def cut_invariant(self) -> bool:
        """Say if results are the same however a text is cut into segments. Where a token sees all of
        its segment beside a memory of fixed length, they are not, by design."""
        return True

    def is_as_made(self) -> bool:
        """Check that these are exactly the modules of :attr:`schema`, so that kernels may stand in."""
        return self.schema is not None and is_exactly(self, self.schema)

    def through(self, part: Callable[..., R], *arguments: Any) -> R:
        """``part(*arguments)``: how a pass calls its layers, so that :attr:`recompute` holds for them.
        A part must change nothing that it is given."""
        return recomputed(part, *arguments) if self.recompute else part(*arguments)

    def initial_memory(self, batch_size: int) -> M:
        """A memory before the first token, ``batch_size`` rows: zeros of :meth:`row_sizes`, in float32
        or better.

        An architecture's own may have more arguments; those that evaluation may change are named in
        ``config.memory_options``.
        """
        sizes: Any = {"tokens_seen": (), **self.row_sizes()}
        return self.memory_type.zeros(next(self.parameters()), batch_size, sizes)

    def row_sizes(self) -> Mapping[str, tuple[int | None, ...]]:
        """The sizes of one row of memory's fields (None: any), ``()`` for integers. Fields that are
        not named here may have any."""
        return {}

    @property
    def device(self) -> torch.device:
        """The device that it computes on."""
        return next(self.parameters()).device

    def own_memory(self, memory: M | None, rows: int) -> M:
        """``memory``, if this backbone can read on from it; an empty one of ``rows`` rows for None.

        Raises:
            MemspanError: it is another architecture's, has other sizes, is on another device, or counts
                what cannot be.
        """
        if memory is None:
            return self.initial_memory(rows)
        check_memory(memory, self.memory_type, self.row_sizes(), self.device)
        return memory

    def __call__(
        self,
        x: Tensor,
        memory: M | None = None,
        *,
        starts: Tensor | None = None,
        lengths: Tensor | list[int] | None = None,
        padding: Padding = "right",
        **options: Any,
    ) -> BackboneOutput[M]:
        """:meth:`forward`, after the checks that all architectures share."""
        weight = next(self.parameters())
        check_vectors(x, self.config.d_model, weight, None, starts)
        if lengths is not None:
            lengths = own_lengths(lengths, x, padding)
        if memory is not None:
            rows = x.shape[0]
            memory = recordable(self.own_memory(memory, rows))
            if memory.batch_size != rows:
                raise MemspanError(
                    f"the memory has {counted(memory.batch_size, 'row')} and the input has {rows}: "
                    "use memory.select for rows, or this model's initial_memory"
                )
        try:
            output: BackboneOutput[M] = super().__call__(
                x, memory, starts=starts, lengths=lengths, padding=padding, **options
            )
        except RuntimeError as error:
            refuse_too_long(error, x)
            raise
        return output

    def forward(
        self,
        x: Tensor,
        memory: M | None = None,
        *,
        starts: Tensor | None = None,
        lengths: Tensor | None = None,
        padding: Padding = "right",
        implementation: str | None = None,
    ) -> BackboneOutput[M]:
        """Read a segment. The arguments have been checked where the backbone itself is called.

        Args:
            x: ``[B, T, D]``.
            memory: what was read before (None: nothing). It is not changed.
            starts: bool ``[B, T]``, true where a document begins (None: nowhere): nothing before it is
                visible from there on, neither in the segment nor in memory.
            lengths: integers ``[B]``, each row's number of tokens; the rest is padding, which changes
                nothing (None: no padding). Where the architecture does not know documents, each is
                read as a row of its own, which breaks a graph of ``torch.compile``.
            padding: the side that padding is on.
            implementation: ``reference`` or another that the architecture has (None: the fastest that
                can run here).

        Raises:
            MemspanError: an argument is not as described here; the implementation does not exist or
                cannot run.
        """
        refuse_unknown_implementation(implementation, self.implementations)
        memory = self.initial_memory(x.shape[0]) if memory is None else memory
        read: Any = partial(self.read_piece, implementation=implementation)
        by = read_whole if self.knows_documents else read_in_pieces
        return by(read, x, memory, starts, lengths, padding)

    def read_piece(self, x: Tensor, memory: M, implementation: str | None) -> BackboneOutput[M]:
        """Read a segment ``x [B, T, D]``, ``T >= 1``, in which no document begins and no row is padded.
        An architecture whose results depend on the cuts has a ``forward`` of its own instead."""
        raise NotImplementedError

    def reader(self, memory: M | None, batch_size: int, **options: Any) -> BackboneReader[M]:
        """Read on without gradients, as fast as can be, in evaluation mode.

        Args:
            memory: what was read before (None: nothing, in ``batch_size`` rows).
            batch_size: rows, B, where there is no memory to take them from.
            options: more arguments of ``forward``.
        """
        memory = self.own_memory(memory, batch_size)
        caches = self.is_as_made() and has_versions(self)
        kind = self.reader_type() if caches else PassReader
        return kind(self, memory, **options)

    def reader_type(self) -> Callable[..., BackboneReader[M]]:
        """The reader of the modules that the backbone was made with."""
        return PassReader

    def longest_segment(self, memory: M, **options: Any) -> int | None:
        """The most tokens that can be read at once after ``memory`` (None: any number). The options
        are those of :meth:`reader`."""
        return None

    def load_memory(self, path: Path | IO[bytes], fingerprint: str, like: Memory) -> Memory:
        """Load a file of ``memory.save(path, fingerprint)``. ``like``: an empty memory of this
        backbone, without rows where the file may have any number."""
        return type(like).load(path, fingerprint, like=like)

    def context(self, segment_length: int, **options: Any) -> tuple[int, int] | None:
        """Number of earlier tokens that a token sees, away from the text's beginning, least and most,
        where the options are those of :meth:`reader` (None: as far as the memory reaches)."""
        return None

    def units(self) -> list[nn.Module]:
        """Modules whose parameters are used in their own forward pass and nowhere else, so that
        processes that share the parameters may gather them for it and drop them again."""
        return list(self.layers)

    def auxiliary_parameters(self) -> list[nn.Parameter]:
        """Parameters that only the auxiliary loss trains: clipped apart, with their own rate."""
        return []

    def float32_part(self) -> str | None:
        """Name the part computed in float32 even under autocast: a clause (None: none that counts)."""
        return None

    def compiled_loops(self) -> bool | None:
        """Check that this architecture's loops in C can run here (None: it has none)."""
        return None

    def attention_weights(self, x: Tensor, memory: M) -> AttentionWeights | None:
        """Attention weights of a segment ``x [B, T, D]``, by the reference implementation,
        without gradients (None: there is no attention to look at)."""
        return None

    def write_retention(self, x: Tensor, memory: M) -> WriteRetention | None:
        """Measure how long writes of ``x [B, T, D]`` can be read back, without gradients (None: nothing
        is written to matrices)."""
        return None

    def transferable_weights(self, distances: Tensor) -> TransferableWeights | None:
        """Weights that another architecture can take (None: none mean the same elsewhere).

        ``distances``: int64 ``[P]``, those whose position terms are wanted, ascending. Of a learned
        table only its rows among them are returned.
        """
        return None

    def taken_from(self, source: Backbone[Memory]) -> dict[str, Tensor] | None:
        """Tensors by this backbone's names, from another architecture's ``source`` of the same width.

        None: there is nothing to take.

        Raises:
            MemspanError: other heads, where the heads' weights are taken.
        """
        return None


def not_copied(reader: object, protocol: object) -> NoReturn:
    """A reader's ``__reduce_ex__``, for copies and pickles: they would share buffers, or lack them.

    Raises:
        MemspanError: says what to copy instead.
    """
    raise MemspanError(
        "a reader cannot be copied or pickled: take its memory, a value, and make another reader "
        "with model.reader(reader.memory)"
    )


F = TypeVar("F", bound=Callable[..., Any])


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
            refuse_too_long(error, x)
            raise

    @by_one_thread
    def step(self, x: Tensor) -> Tensor:
        """See :meth:`BackboneReader.step`."""
        check_step(x, *self._expected)
        return self._step_on(x)

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
