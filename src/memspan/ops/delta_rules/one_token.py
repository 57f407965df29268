"""Single tokens through a whole stack with matrix memories, by the step in C, ``step.h``."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple, get_type_hints

from torch import Tensor

from memspan.native.stack import ROWS_AT_ONCE, PackedStack, Stack
from memspan.native.threads import in_shares

LARGEST_WRITES = 32
"""Writes of a token that the step in C can do."""

_LAYER = (
    "convolution", "convolution_bias", "rate", "step_bias", "gain", "skip", "memory", "inputs",
)  # fmt: skip


class TokenOptions(NamedTuple):
    """Sizes and choices alike in all layers; see ``TokenStep`` in C."""

    key_heads: int
    key_width: int
    taps: int
    writes: int = 1
    """Writes of a token, before it reads."""
    n_betas: int = 0
    """Logits of beta: the delta rule's."""
    n_erases: int = 0
    """Logits of erase gates; then there is one of a write gate for each value."""
    n_steps: int = 0
    """Steps of the decay: of each head, of each channel of a key, or none."""
    unit: bool = False
    """Queries and keys have length 1."""
    scales_values: bool = False
    """A value is written times its head's step."""
    sigmoid: bool = False
    """The activation of the output's gate; False: SiLU."""
    gate_first: bool = False
    """Outputs are normalised after the gate."""
    normed: int = 1
    """Outputs that are normalised together."""
    n_gains: int = 1
    """Gains, for as many outputs in turn."""
    query_scale: float = 1.0
    largest: float = 1.0
    """The largest beta or erase gate."""
    epsilon: float = 1e-6
    """Inside the roots that normalise queries, keys and outputs."""


class _Layer(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in _LAYER)


class _Step(ctypes.Structure):
    _fields_ = (
        ("stack", Stack),
        *(
            (name, ctypes.c_double if kind is float else ctypes.c_int64)
            for name, kind in get_type_hints(TokenOptions).items()
        ),
        ("layers", ctypes.c_void_p),
    )


class CompiledStep:
    """One token of every row through a stack whose memories are written in place, without gradients.

    Args:
        stack: the weights; projections are queries, keys and values of each write, the output's gates,
            and logits as in :class:`TokenOptions`, in its order.
        layers: per layer, contiguous: ``convolution [W, C]``, the token's own last, and
            ``convolution_bias [C]``, where there are any; ``rate [H]`` and ``step_bias``, of which the
            logarithm of a decay is ``rate softplus(step + step_bias)``, or without steps the rate;
            ``gain``; where there is one, ``skip [H]``, how much of its value a head passes on; and what
            is written in place, ``memory [B, H, K, V]`` and ``inputs [B, W - 1, C]``.
        options: what is alike in all layers.
    """

    def __init__(
        self, stack: PackedStack, layers: Sequence[dict[str, Tensor]], options: TokenOptions
    ) -> None:
        # C has their addresses: they must live as long as this.
        self._stack = stack
        self._tensors = list(layers)
        assert all(t.is_contiguous() for layer in layers for t in layer.values())
        pointers = [{name: t.data_ptr() for name, t in layer.items()} for layer in layers]
        self._layers = (_Layer * len(layers))(*(_Layer(**each) for each in pointers))
        self._step = _Step(
            stack=stack.structure, layers=ctypes.addressof(self._layers), **options._asdict()
        )

    def read(self, x: Tensor) -> None:
        """Read ``x [B, 1, D]``, contiguous, and replace it by the output.

        Raises:
            MemspanError: there is not enough memory.
        """
        stack = self._stack
        self._step.stack.x = x.data_ptr()
        given = (ctypes.byref(self._step), stack.matrices)
        in_shares(stack.code.step, given, len(x), stack.n_weights * len(x), ROWS_AT_ONCE)
