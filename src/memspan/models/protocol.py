"""The interface of a backbone: what an architecture implements, and what it is given in return.

Required are ``memory_type``, its ``row_sizes``, and ``read_piece`` or, where results depend on the
cuts, ``forward``; ``initial_memory`` where sizes are the memory's own. They come first in
:class:`Backbone`. Everything else has a default, the reader included: an architecture needs one of its
own only to stream faster than by whole passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from memspan.errors import MemspanError, counted
from memspan.models.defaults import Defaults, M
from memspan.models.inputs import check_memory, check_vectors, own_lengths
from memspan.models.options import BackboneConfig
from memspan.models.output import BackboneOutput
from memspan.models.packing import Schema, has_versions, is_exactly
from memspan.models.readers import BackboneReader, PassReader
from memspan.models.recomputation import recomputed
from memspan.models.remedies import refuse_with_remedy
from memspan.models.segments import Padding, read_in_pieces, read_whole
from memspan.models.sizes import refuse_oversized_model
from memspan.ops.implementations import refuse_unknown_implementation
from memspan.trees import constant, recordable

R = TypeVar("R")


class Backbone(Defaults[M]):
    """A stack over vectors: ``[B, T, D]`` and a memory in, ``[B, T, D]`` and a memory out."""

    # ----- Required

    config: BackboneConfig
    memory_type: type[M]
    """A frozen dataclass, see :class:`memspan.memory.Memory`."""

    def __init__(self, config: BackboneConfig) -> None:
        """Keep the options, and refuse sizes that no machine holds."""
        super().__init__()
        refuse_oversized_model(config)
        constant(type(config))
        self.config = config

    def row_sizes(self) -> Mapping[str, tuple[int | None, ...]]:
        """The sizes of one row of memory's fields (None: any), ``()`` for integers. Fields that are
        not named here may have any."""
        return {}

    def read_piece(self, x: Tensor, memory: M, implementation: str | None) -> BackboneOutput[M]:
        """Read a segment ``x [B, T, D]``, ``T >= 1``, in which no document begins and no row is padded.
        An architecture whose results depend on the cuts has a ``forward`` of its own instead."""
        raise NotImplementedError

    # ----- Overridden where an architecture differs

    implementations: tuple[str, ...] = ("reference",)
    """Values that ``implementation`` may have. Some cannot run with every option or on every machine:
    asking for one is then an error."""
    knows_documents: bool = False
    """True if :meth:`read_piece` takes any segment, with its :class:`Documents` or None as
    ``documents``: one graph of ``torch.compile``. Otherwise it is called for each document."""
    schema: Schema | None = None
    """The modules for which this architecture's reader was written, and functions that take a whole
    segment through all layers (None: there are none)."""

    def initial_memory(self, batch_size: int) -> M:
        """A memory before the first token, ``batch_size`` rows: zeros of :meth:`row_sizes`, in float32
        or better.

        An architecture's own may have more arguments; those that evaluation may change are named in
        ``config.memory_options``.
        """
        sizes: Any = {"tokens_seen": (), **self.row_sizes()}
        return self.memory_type.zeros(next(self.parameters()), batch_size, sizes)

    def cut_invariant(self) -> bool:
        """Say if results are the same however a text is cut into segments. Where a token sees all of
        its segment beside a memory of fixed length, they are not, by design."""
        return True

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

    def reader(
        self, memory: M | None, batch_size: int, *, cuda_graph: bool = False, **options: Any
    ) -> BackboneReader[M]:
        """Read on without gradients, as fast as can be, in evaluation mode.

        Args:
            memory: what was read before (None: nothing, in ``batch_size`` rows).
            batch_size: rows, B, where there is no memory to take them from.
            cuda_graph: launch the pass of a single token as one CUDA graph.
            options: more arguments of ``forward``.

        Raises:
            MemspanError: a CUDA graph is asked for where there is no CUDA, or where modules have hooks.
        """
        memory = self.own_memory(memory, batch_size)
        if cuda_graph:
            from memspan.models.captured import CapturedReader

            return CapturedReader(self, memory, **options)
        caches = self.is_as_made() and has_versions(self)
        kind = self.reader_type() if caches else PassReader
        return kind(self, memory, **options)

    def reader_type(self) -> Callable[..., BackboneReader[M]]:
        """The reader of the modules that the backbone was made with."""
        return PassReader

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

    # ----- The same for all

    recompute: bool = False
    """True if each layer keeps only its inputs for backward, and is computed again there
    (activation checkpointing): less memory for more time, and the same numbers bit for bit."""

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
            refuse_with_remedy(error, self, x, options.get("implementation"))
            raise
        return output

    def through(self, part: Callable[..., R], *arguments: Any) -> R:
        """``part(*arguments)``: how a pass calls its layers, so that :attr:`recompute` holds for them.
        A part must change nothing that it is given."""
        return recomputed(part, *arguments) if self.recompute else part(*arguments)

    def is_as_made(self) -> bool:
        """Check that these are exactly the modules of :attr:`schema`, so that kernels may stand in."""
        return self.schema is not None and is_exactly(self, self.schema)

    @property
    def device(self) -> torch.device:
        """The device that it computes on."""
        return next(self.parameters()).device
