"""The functions of a model that carries state.

``B`` is the number of rows, ``T`` that of tokens or other steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn

from statelaws.inputs import Inputs

State = TypeVar("State")
Padding = Literal["right", "right-last", "left", "left-continued"]


@dataclass(frozen=True)
class Claims:
    """A model's statements about itself, where models differ by design."""

    consumes_state: bool = False
    """``read`` uses up the given state. False: that stays usable."""
    cuts: bool | int = True
    """Outputs do not depend on where a text is cut. False: they do, by design, and laws are tested at
    equal cuts. A number n from 2 on: they do not where all cuts are at multiples of n tokens."""
    bounded: bool = True
    """The state stops growing. False: it grows with every token, as a cache of all keys does."""
    carries_gradients: bool = True
    """Gradients flow through the state that is passed in. False: it is detached, by design."""
    padding: frozenset[Padding] = frozenset()
    """Padding that the documentation promises to ignore: on the right, on the right of a last segment,
    on the left of a first segment, on the left of a later one."""
    rows: bool = True
    """A row's outputs do not depend on the other rows. False: they do, by design, as where experts have
    room for so many tokens of a batch."""
    looks_ahead: int = 0
    """Number of later steps that an output may depend on, by design, as within the chunks of an
    encoder's attention."""
    lengths: Mapping[str, int] = field(default_factory=dict)
    """Internal lengths in tokens that a test should cross, such as a window, a chunk, a convolution or
    a table of positions, by name."""
    moves_in_training: bool = False
    """A forward pass in training mode changes later outputs, by design, as the running statistics of
    batch normalisation do."""

    def __post_init__(self) -> None:
        if self.cuts < 0:
            raise ValueError(
                f"Claims.cuts must be true, false or a number of tokens, not {self.cuts}"
            )
        for name, length in self.lengths.items():
            if length < 1:
                raise ValueError(
                    f"Claims.lengths: {name!r} must be at least 1 token, not {length}: leave it out"
                )

    @property
    def anywhere(self) -> bool:
        """True if a text may be cut anywhere."""
        return self.cuts == 1


@runtime_checkable
class Stateful(Protocol[State]):
    """A model that carries state from one call to the next. The state is whatever the model likes."""

    inputs: Inputs
    claims: Claims
    module: nn.Module
    """The module that computes: its weights are perturbed to see how exact numbers are, and it is put
    into training and evaluation mode."""

    def start(self, batch_size: int) -> State:
        """The state of ``batch_size`` rows that have read nothing."""

    def read(self, inputs: Any, state: State) -> tuple[Tensor, State]:
        """Read ``inputs``, as :class:`Inputs` says, on from ``state``: outputs ``[B, T, ...]``, of
        floating-point type, and the state after them."""

    def select(self, state: State, rows: Tensor) -> State:
        """The state of ``rows``, int64 ``[B']``, in any order, repeated or left out. ``state`` may be
        used up."""

    def copy(self, state: State) -> State:
        """A state that stays as it is, whatever is done with ``state``. Gradients need not reach it."""


@runtime_checkable
class Resets(Protocol[State]):
    """A model whose rows can begin anew."""

    def reset(self, state: State, rows: Tensor) -> State:
        """``state`` emptied in the rows where ``rows``, bool ``[B]``, is true. ``state`` may be used
        up."""


@runtime_checkable
class Truncates(Protocol[State]):
    """A model that can roll back."""

    def truncate(self, state: State, n: int) -> State:
        """``state`` as it was ``n`` tokens ago. It may be used up."""


@runtime_checkable
class Saves(Protocol[State]):
    """A model whose states can be kept in files."""

    def save(self, state: State, path: Path) -> None:
        """Write ``state``."""

    def load(self, path: Path) -> State:
        """Read a state that :meth:`save` wrote."""


@runtime_checkable
class ReadsPadded(Protocol[State]):
    """A model that reads rows of different lengths together."""

    def read_padded(
        self, inputs: Any, state: State, lengths: Tensor, side: Literal["right", "left"]
    ) -> tuple[Tensor, State]:
        """Read as :meth:`Stateful.read` does, but only ``lengths[i]`` inputs of row ``i`` are real
        (int64 ``[B]``). The rest, on that ``side``, is padding, with any values."""


@runtime_checkable
class ReadsPacked(Protocol[State]):
    """A model that reads several documents in a row of inputs."""

    def read_packed(self, inputs: Any, state: State, starts: Tensor) -> tuple[Tensor, State]:
        """Read as :meth:`Stateful.read` does; a document begins where ``starts``, bool ``[B, T]``, is
        true, and sees nothing of what was before it."""


@runtime_checkable
class ReadsVarlen(Protocol[State]):
    """A model that reads rows of several lengths laid end to end, as kernels with ``cu_seqlens`` do."""

    def read_varlen(self, inputs: Any, state: State, cu_seqlens: Tensor) -> tuple[Tensor, State]:
        """Read inputs ``[1, N, ...]``, of which ``cu_seqlens[i]`` to ``cu_seqlens[i + 1]`` (int64
        ``[B + 1]``) are read on from row ``i`` of ``state``: outputs ``[1, N, ...]``, and the state of
        the ``B`` rows after them."""


@runtime_checkable
class Replays(Protocol):
    """A model that is trained on windows of what was read step by step, as a policy is."""

    def replay(self, inputs: Any, state: Any, starts: Tensor) -> Tensor:
        """Outputs ``[B, T, ...]`` of a window as training computes them, from the state that was stored
        before its first step. A row begins anew where ``starts``, bool ``[B, T]``, is true."""


MADE = "module = ...  # in evaluation mode"
"""In scripts, a module of unknown origin."""
