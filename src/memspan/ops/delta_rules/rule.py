"""The generalized delta rule, of which the memories of today's models are cases.

Each head has a matrix ``S [K, V]``. With decays ``alpha [K]`` and vectors ``a, c, k, q [K]`` and
``v [V]``::

    S' = diag(alpha) S - a (c S) + k (x) v        y = q S'

So Peng et al. call it (RWKV-7, arXiv 2503.14456); its transition is diagonal plus low rank. Cases:

=================  ====================  =====================================  ====================
model              alpha                 a, c                                   k, v
=================  ====================  =====================================  ====================
linear attention   none                  none                                   phi(k), v
RetNet             constant, per head    none                                   k, v
Mamba-2            per head              none                                   Delta B, x
GLA                per channel           none                                   k, v
DeltaNet           none                  beta k, k                              beta k, v
Gated DeltaNet     per head              beta k, alpha k                        beta k, v
KDA (Kimi Linear)  per channel           beta k, alpha k                        beta k, v
RWKV-7             per channel           eta kappa, kappa                       k, v
=================  ====================  =====================================  ====================

The three with ``beta`` replace the value that they find under their own key,
``S' = D S + beta k (x) (v - k D S)``. For them :func:`~memspan.ops.delta_rule` has less to compute.
DeltaProduct reads ``n`` tokens of that rule for one: it decays before the first and reads after the
last.

``reference.py`` is the equation, a loop over tokens, ``compiled.py`` the same in C; ``chunked.py`` with
``decays.py`` computes it by chunks of tokens; ``fla.py`` hands it to another library's kernels.

In C all decays, erasing or not, are one loop, of which :func:`~memspan.ops.delta_rule` with a decay per
channel is a case; and so are single tokens of all models above but RWKV-7 (``step.h``). Two kinds have
code of their own. Without a decay DPFP's features are mostly zeros, which a loop of its own skips. With
a decay per head, or none, chunks need fewer operations in the backward pass, since the decays between
tokens are numbers by which products of matrices can be multiplied. Forward the loop takes .67 to 1.02
of their time; with backward it takes as long for heads of 32, 1.1 to 1.25 times as long for 64 and 1.4
for 128. With a decay per channel there would be a number for each channel and pair of tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from memspan.errors import MemspanError
from memspan.native import library
from memspan.ops.fast_weights.rules import Chunking, refuse_growing, starts_as_decays
from memspan.ops.implementations import (
    Implementation,
    check_rows,
    check_together,
    choose,
    without_autocast,
)


class Inputs(NamedTuple):
    """Arguments of :func:`generalized_delta_rule`, shapes as there."""

    q: Tensor
    k: Tensor
    v: Tensor
    weights: Tensor
    log_decay: Tensor | None = None
    erase: Tensor | None = None
    lookup: Tensor | None = None
    starts: Tensor | None = None
    chunking: Chunking = Chunking()

    def check(self, alike: bool = True) -> None:
        """Raise :class:`MemspanError` where shapes, devices or, with ``alike``, types do not go
        together, or a decay would grow."""
        q, k, v, weights, log_decay, erase, lookup, starts, chunking = self
        check_together(
            alike, q=q, k=k, v=v, weights=weights, log_decay=log_decay, erase=erase, lookup=lookup
        )
        if not q.dim() == v.dim() == 4 or q.shape != k.shape or q.shape[:3] != v.shape[:3]:
            raise MemspanError(
                f"queries, keys and values do not fit together: {[*q.shape]}, {[*k.shape]}, "
                f"{[*v.shape]}; pass [B, H, T, K] twice and [B, H, T, V]"
            )
        batch, n_heads, length, width = k.shape
        if length < 1:
            raise MemspanError("there are no tokens to read: pass at least one")
        if (erase is None) != (lookup is None):
            raise MemspanError("erase and lookup go together: pass both, or neither")
        for name, given in (("erase", erase), ("lookup", lookup)):
            if given is not None and given.shape != k.shape:
                raise MemspanError(f"{name} must be like k, {[*k.shape]}, not {[*given.shape]}")
        if log_decay is not None:
            if log_decay.shape not in (k.shape, k.shape[:3]):
                raise MemspanError(
                    f"log_decay must be [B, H, T] or [B, H, T, K], {[*k.shape]}, not "
                    f"{[*log_decay.shape]}"
                )
            refuse_growing(log_decay)
        check_rows("starts", starts, torch.bool, "[B, T]", v.device, batch, length)
        memory = (batch, n_heads, width, v.shape[3])
        if weights.shape != memory:
            raise MemspanError(
                f"the memory is {[*weights.shape]}, and for these keys and values must be "
                f"{[*memory]}, [B, H, K, V]"
            )
        if chunking.size < 1:
            raise MemspanError(f"the chunk size must be at least 1, not {chunking.size}")

    def to(self, dtype: torch.dtype) -> Inputs:
        """In this type."""
        changed: Any = {
            name: x.to(dtype)
            for name, x in self._asdict().items()
            if isinstance(x, Tensor) and x.is_floating_point()
        }
        return self._replace(**changed)

    def with_starts_as_decays(self) -> Inputs:
        """The same with starts as decays of zero, before which nothing is looked up."""
        starts = self.starts
        if starts is None:
            return self
        weights, log_decay = starts_as_decays(self.weights, self.log_decay, self.v, starts)
        lookup = self.lookup
        return self._replace(
            weights=weights,
            log_decay=log_decay,
            lookup=None if lookup is None else lookup.masked_fill(starts[:, None, :, None], 0),
            starts=None,
        )


def _compiled(inputs: Inputs) -> tuple[Tensor, Tensor]:
    from memspan.ops.delta_rules import compiled

    inputs = inputs.with_starts_as_decays()
    q, k, v, weights, log_decay, erase, lookup, _, chunking = inputs
    return compiled.run(
        q,
        k,
        v,
        weights,
        log_decay=log_decay,
        erase=erase,
        lookup=lookup,
        recompute=chunking.recompute,
    )


def _compiled_obstacle(inputs: Inputs) -> str | None:
    from memspan.ops.delta_rules import compiled

    return None if compiled.available(inputs.v) else library.obstacle("chunked")


def _compiled_suits(inputs: Inputs) -> bool:
    """False in exported graphs: others shall read them without memspan."""
    return not torch.compiler.is_exporting()


def _chunked(inputs: Inputs) -> tuple[Tensor, Tensor]:
    from memspan.ops.delta_rules import chunked

    return chunked.run(inputs)


def _fla(inputs: Inputs) -> tuple[Tensor, Tensor]:
    from memspan.ops.delta_rules import fla

    return fla.run(inputs)


def _fla_obstacle(inputs: Inputs) -> str | None:
    from memspan.ops.delta_rules import fla

    return fla.obstacle(inputs)


def _reference(inputs: Inputs) -> tuple[Tensor, Tensor]:
    from memspan.ops.delta_rules import reference

    return reference.run(inputs)


IMPLEMENTATIONS: dict[str, Implementation[Inputs, tuple[Tensor, Tensor]]] = {
    "compiled": Implementation(_compiled, _compiled_obstacle, _compiled_suits),
    "chunked": Implementation(_chunked, suits=lambda inputs: inputs.k.shape[2] > 1),
    "fla": Implementation(_fla, _fla_obstacle, suits=lambda inputs: False),
    "reference": Implementation(_reference),
}
"""By preference. ``compiled``: the loop in C, on a CPU, in float32 or float64. ``chunked``: matrix
products over chunks of tokens. ``fla``: only by name, on CUDA, in bfloat16, never run there yet.
``reference``: the loop, which elsewhere reads single tokens. It and ``chunked`` are plain autograd, on
any device, with gradients of gradients."""


def generalized_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor,
    *,
    log_decay: Tensor | None = None,
    erase: Tensor | None = None,
    lookup: Tensor | None = None,
    starts: Tensor | None = None,
    chunking: Chunking | None = None,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Read ``T`` tokens with ``S' = diag(alpha) S - a (c S) + k (x) v`` and ``y = q S'``.

    Args:
        q: queries ``[B, H, T, K]``, which read after the token's write.
        k: keys, like the queries, under which the values are written.
        v: values ``[B, H, T, V]``.
        weights: the memory before the first token, ``[B, H, K, V]``.
        log_decay: the logarithm of ``alpha``, at most 0, of each head, ``[B, H, T]``, or of each
            channel of the keys, ``[B, H, T, K]`` (None: nothing decays).
        erase: ``a``, like ``k``: where the value that was found is taken away (None: nothing is).
        lookup: ``c``, like ``k``: what that value is looked up with, before the decay.
        starts: bool ``[B, T]``: the memory is emptied before the token (None: never).
        chunking: how the work is divided (None: the defaults). With ``recompute`` the backward pass
            computes each chunk again.
        implementation: a name from :data:`IMPLEMENTATIONS`; None: the first that suits.

    Returns:
        ``y [B, H, T, V]`` and the memory after the last token, ``[B, H, K, V]``.

    Raises:
        MemspanError: shapes, types or devices do not go together; a ``log_decay`` is above 0, where
            looking waits for no device; the implementation does not exist or cannot run.
    """
    inputs = Inputs(q, k, v, weights, log_decay, erase, lookup, starts, chunking or Chunking())
    # Only fla's kernels take a memory of another type.
    inputs.check(alike=implementation != "fla")
    with without_autocast(q):
        return choose(IMPLEMENTATIONS, implementation, inputs)(inputs)
