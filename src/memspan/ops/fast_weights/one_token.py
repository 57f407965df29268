"""Single tokens of Fast Weights and Gated DeltaNet through a whole stack, by the steps in C."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from memspan.native import library
from memspan.native.stack import ROWS_AT_ONCE, PackedStack, Stack
from memspan.native.threads import in_shares
from memspan.ops.fast_weights.feature_maps import DPFP


class _Step(ctypes.Structure):
    _fields_ = (
        ("stack", Stack),
        ("nu", ctypes.c_int64),
        ("normalises", ctypes.c_int64),
        ("delta", ctypes.c_int64),
        ("epsilon", ctypes.c_double),
        ("memories", ctypes.c_void_p),
    )


class CompiledStep:
    """One token of every row through a stack whose memories are written in place, without gradients.

    Args:
        stack: the weights; projections are queries, keys, values and, for the delta rule, beta.
        memories: per layer ``[B, H, F, K]``, contiguous.
        dpfp: the feature map.
        delta: whether it is the delta rule.
    """

    def __init__(
        self, stack: PackedStack, memories: Sequence[Tensor], dpfp: DPFP, delta: bool
    ) -> None:
        # C has their addresses: they must live as long as this.
        self._stack = stack
        self._memories = list(memories)
        assert all(t.is_contiguous() for t in self._memories)
        self._pointers = (ctypes.c_void_p * len(memories))(*(t.data_ptr() for t in memories))
        self._step = _Step(
            stack=stack.structure,
            nu=dpfp.nu,
            normalises=dpfp.epsilon is not None,
            delta=delta,
            epsilon=dpfp.epsilon or 0.0,
            memories=ctypes.addressof(self._pointers),
        )
        self._at = ctypes.byref(self._step)

    def read(self, x: Tensor) -> bool:
        """Read ``x [B, 1, D]``, contiguous, and replace it by the output; whether that is finite.

        Raises:
            MemspanError: there is not enough memory.
        """
        self._step.stack.x = x.data_ptr()
        finite = self._stack.code.step(self._at, self._stack.matrices)
        library.refuse_without_memory(finite >= 0)
        return bool(finite)


_GATED_LAYER = ("convolution", "rate", "step_bias", "gain", "memory", "inputs")


class _GatedLayer(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in _GATED_LAYER)


class _GatedStep(ctypes.Structure):
    _fields_ = (
        ("stack", Stack),
        ("key_heads", ctypes.c_int64),
        ("key_width", ctypes.c_int64),
        ("taps", ctypes.c_int64),
        ("beta", ctypes.c_double),
        ("epsilon", ctypes.c_double),
        ("layers", ctypes.c_void_p),
    )


class CompiledGatedStep:
    """One token of every row through a stack of Gated DeltaNet, without gradients.

    Args:
        stack: the weights; projections are queries, keys, values, gates, and logits of beta and of the
            decay.
        layers: per layer, contiguous: ``convolution [W, C]``, the token's own last; ``rate`` and
            ``step_bias``, ``[H]``, of which the logarithm of a decay is
            ``rate softplus(step + step_bias)``; ``gain [V]``; and what is written in place,
            ``memory [B, H, K, V]`` and ``inputs [B, W - 1, C]``.
        key_heads: heads of keys.
        beta: the largest.
        epsilon: inside the roots that normalise queries, keys and outputs.
    """

    def __init__(
        self,
        stack: PackedStack,
        layers: Sequence[dict[str, Tensor]],
        *,
        key_heads: int,
        beta: float,
        epsilon: float,
    ) -> None:
        # C has their addresses: they must live as long as this.
        self._stack = stack
        self._tensors = list(layers)
        assert all(t.is_contiguous() for layer in layers for t in layer.values())
        pointers = [{name: t.data_ptr() for name, t in layer.items()} for layer in layers]
        self._layers = (_GatedLayer * len(layers))(*(_GatedLayer(**each) for each in pointers))
        first = layers[0]
        self._step = _GatedStep(
            stack=stack.structure,
            key_heads=key_heads,
            key_width=first["memory"].shape[2],
            taps=len(first["convolution"]),
            beta=beta,
            epsilon=epsilon,
            layers=ctypes.addressof(self._layers),
        )

    def read(self, x: Tensor) -> None:
        """Read ``x [B, 1, D]``, contiguous, and replace it by the output.

        Raises:
            MemspanError: there is not enough memory.
        """
        stack = self._stack
        self._step.stack.x = x.data_ptr()
        function = stack.code.gated_step
        given = (ctypes.byref(self._step), stack.matrices)
        in_shares(function, given, len(x), stack.n_weights * len(x), ROWS_AT_ONCE)
