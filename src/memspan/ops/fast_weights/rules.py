"""Fast weights that every token writes to and reads from (Schlag et al. 2021, section 4).

Each head has a matrix ``W [F, V]`` (the paper's, transposed). With features ``q, k [F]`` and a value
``v [V]``::

    delta rule      W' = W + beta k (x) (v - k W)        y = q W'            (eq. 24 and 25)
    with a decay    W' = a W + beta k (x) (v - k a W)    y = q W'            (Yang et al. 2024)
    sum             W' = W + k (x) v                     y = q W'            (eq. 17)
    outer product   W' = f(W + k (x) v), f tanh or none  y = q W'            (eq. 2; Schmidhuber 1991)

Yang, Kautz and Hatamizadeh (arXiv 2412.06464) call the second the gated delta rule, eq. 10.
All but the last have three implementations, each in a file of its own: ``reference.py``, a loop over
tokens; ``chunked.py``, matrix products over chunks of tokens (Yang et al. 2024, arXiv 2406.06484);
``compiled.py``, the loop over tokens in C, or chunks in C. ``fla.py`` hands the delta rule to
another library's kernels. Derived in ``docs/annotated/delta_rule.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from memspan.errors import MemspanError
from memspan.ops.implementations import (
    Implementation,
    check_name,
    check_rows,
    check_together,
    choose,
    without_autocast,
)

FeatureMap = Callable[[Tensor], Tensor]
"""``[..., K] -> [..., F]``, see :mod:`memspan.ops.fast_weights.feature_maps`."""


@dataclass(frozen=True)
class Chunking:
    """Division of the work into chunks; results do not depend on it."""

    size: int = 32
    """Tokens per chunk. The loops over single tokens ignore it."""
    recompute: bool = False
    """Store fewer memories for the backward pass and recompute the others: one every 16 chunks
    (compiled: every 256 tokens instead of 64, with a decay of 32). Chunked training then takes a third
    longer."""


_CHUNKING = Chunking()


class RuleInputs(NamedTuple):
    """Arguments of :func:`~memspan.ops.fast_weights.rules.delta_rule`, shapes as there."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    """None: the sum rule."""
    weights: Tensor
    feature_map: FeatureMap | None
    chunking: Chunking
    log_decay: Tensor | None = None
    """None: no decay."""
    out: Tensor | None = None
    """Where the memory after the last token goes; None: a new tensor."""
    starts: Tensor | None = None
    """None: the memory is never emptied."""

    def tensors(self) -> list[Tensor]:
        """All floating-point tensors, ``beta`` and ``log_decay`` where there are any."""
        given = (self.q, self.k, self.v, self.beta, self.weights, self.log_decay)
        return [tensor for tensor in given if tensor is not None]

    def to(self, dtype: torch.dtype) -> RuleInputs:
        """In this type."""
        changed: Any = {
            name: x.to(dtype)
            for name, x in self._asdict().items()
            if isinstance(x, Tensor) and x.is_floating_point()
        }
        return self._replace(**changed | {"out": None})

    def with_decay(self) -> RuleInputs:
        """The same with starts as decays of zero, see :func:`starts_as_decays`."""
        if self.starts is None:
            return self
        weights, decay = starts_as_decays(self.weights, self.log_decay, self.v, self.starts)
        return self._replace(weights=weights, log_decay=decay, starts=None)

    def features(self, x: Tensor) -> Tensor:
        """``[..., K] -> [..., F]``."""
        return x if self.feature_map is None else self.feature_map(x)

    def by_value_head(self) -> RuleInputs:
        """The same with as many heads of queries and keys as of values: each is repeated for those that
        it serves."""
        share = self.v.shape[1] // self.k.shape[1]
        if share == 1:
            return self
        q, k = (torch.repeat_interleave(x, share, 1) for x in (self.q, self.k))
        return self._replace(q=q, k=k)

    def check(self, alike: bool = True) -> None:
        """Raise :class:`MemspanError` where shapes, devices or, with ``alike``, types do not go
        together, or a decay would grow."""
        q, k, v, beta, weights, _, chunking, decay, _, starts = self
        check_together(alike, q=q, k=k, v=v, weights=weights, beta=beta, log_decay=decay)
        queries = q.shape
        keys = k.shape
        values = v.shape
        if (
            not len(keys) == len(values) == 4
            or queries != keys
            or (keys[0], keys[2]) != (values[0], values[2])
        ):
            raise MemspanError(
                f"queries, keys and values do not fit together: {[*queries]}, {[*keys]}, {[*values]}; "
                "pass [B, H, T, K] twice and [B, H, T, V]"
            )
        batch, n_heads, length, value_width = values
        if keys[1] < 1 or n_heads % keys[1]:
            raise MemspanError(
                f"{n_heads} heads of values cannot share {keys[1]} heads of keys evenly: pass a "
                "multiple"
            )
        if beta is not None and beta.shape != values[:3]:
            raise MemspanError(f"beta must be [B, H, T], {[*values[:3]]}, not {[*beta.shape]}")
        check_rows("starts", starts, torch.bool, "[B, T]", v.device, batch, length)
        if length < 1:
            raise MemspanError("there are no tokens to read: pass at least one")
        n_features = self._n_features()
        if decay is not None:
            if decay.shape not in (values[:3], (*values[:3], n_features)):
                raise MemspanError(
                    f"log_decay must be [B, H, T] or [B, H, T, F], {[*values[:3], n_features]}, not "
                    f"{[*decay.shape]}"
                )
            refuse_growing(decay)
        if chunking.size < 1:
            raise MemspanError(f"the chunk size must be at least 1, not {chunking.size}")
        memory = (batch, n_heads, n_features, value_width)
        if weights.shape != memory:
            raise MemspanError(
                f"the memory is {[*weights.shape]}, and for these keys and values must be "
                f"{[*memory]}, [B, H, F, V]"
            )
        if self.out is not None:
            self._check_out(self.out)

    def _check_out(self, out: Tensor) -> None:
        check_together(True, out=out, weights=self.weights)
        if out.shape != self.weights.shape:
            raise MemspanError(f"out is {[*out.shape]}, and the memory {[*self.weights.shape]}")
        if torch.is_grad_enabled() and any(t.requires_grad for t in [out, *self.tensors()]):
            raise MemspanError("out cannot be part of a gradient: call this within torch.no_grad()")

    def _n_features(self) -> int:
        if self.feature_map is None:
            return self.k.shape[-1]
        from memspan.ops.fast_weights.feature_maps import DPFP

        if isinstance(self.feature_map, DPFP):
            return self.feature_map.width(self.k.shape[-1])
        return self.features(self.k[:0]).shape[-1]


def starts_as_decays(
    weights: Tensor, log_decay: Tensor | None, v: Tensor, starts: Tensor
) -> tuple[Tensor, Tensor]:
    """The memory ``[B, H, K, V]``, and logarithms of decays that are zero where documents start.

    A memory that is not finite, which times zero is NaN, is emptied where a document starts at the
    first token.
    """
    decay = torch.zeros_like(v[..., 0]) if log_decay is None else log_decay
    begins = starts[:, None] if decay.dim() == 3 else starts[:, None, :, None]
    weights = weights.masked_fill(starts[:, 0, None, None, None], 0)
    return weights, decay.masked_fill(begins, -torch.inf)


def refuse_growing(log_decay: Tensor) -> None:
    """Raise :class:`MemspanError` where a logarithm of decays is above 0 and looking waits for no
    device."""
    from memspan.devices import can_look

    # Looking at one number costs less than a mask, which matters for a single token.
    if log_decay.numel() and can_look(log_decay) and log_decay.amax().item() > 0:
        raise MemspanError(
            f"log_decay must be at most 0, not {log_decay.max():.3g}: pass the logarithm of a decay in "
            "(0, 1]"
        )


# Imported on first use: whoever needs one rule need not load all of them.


def _compiled(inputs: RuleInputs) -> tuple[Tensor, Tensor]:
    from memspan.ops.fast_weights import compiled

    return compiled.run(inputs)


def _read_few(inputs: RuleInputs) -> tuple[Tensor, Tensor] | None:
    from memspan.ops.fast_weights import compiled

    return compiled.read_few(inputs)


def _compiled_obstacle(inputs: RuleInputs) -> str | None:
    from memspan.ops.fast_weights import compiled

    return compiled.obstacle(inputs)


def _compiled_suits(inputs: RuleInputs) -> bool:
    """False in exported graphs: others shall read them without memspan."""
    return not torch.compiler.is_exporting()


def _chunked(inputs: RuleInputs) -> tuple[Tensor, Tensor]:
    from memspan.ops.fast_weights import chunked

    return chunked.run(inputs)


def _fla(inputs: RuleInputs) -> tuple[Tensor, Tensor]:
    from memspan.ops.fast_weights import fla

    return fla.run(inputs)


def _fla_obstacle(inputs: RuleInputs) -> str | None:
    from memspan.ops.fast_weights import fla

    return fla.obstacle(inputs)


def _reference(inputs: RuleInputs) -> tuple[Tensor, Tensor]:
    from memspan.ops.fast_weights import reference

    return reference.run(inputs)


IMPLEMENTATIONS: dict[str, Implementation[RuleInputs, tuple[Tensor, Tensor]]] = {
    "compiled": Implementation(_compiled, _compiled_obstacle, _compiled_suits),
    "chunked": Implementation(_chunked, suits=lambda inputs: inputs.v.shape[2] > 1),
    "fla": Implementation(_fla, _fla_obstacle, suits=lambda inputs: False),
    "reference": Implementation(_reference),
}
"""By preference. ``compiled``: the loop in C, on a CPU, in float32 or float64.
``chunked``: PyTorch, on any device. ``fla``: only by name, on CUDA, in bfloat16, never run there yet.
``reference``: plain autograd, for ``torch.func``, ``vmap`` and gradients of gradients; elsewhere than
in C also for single tokens.

NaN or infinity in a token spoils what comes after it in its row and head; with ``chunked``, and with
the chunks of ``compiled``, also the earlier tokens of its chunk (of 32, in C of 8). The worst case
known in float32 is one key repeated 1,000 times with ``beta`` 2: ``chunked`` is then off by 1.5e-4,
``compiled`` by 1.4e-5, the loop by 2e-6."""


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    weights: Tensor,
    *,
    log_decay: Tensor | None = None,
    feature_map: FeatureMap | None = None,
    chunking: Chunking | None = None,
    implementation: str | None = None,
    out: Tensor | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Read ``T`` tokens with the delta rule: a value replaces what its key held before (eq. 24, 25).

    Args:
        q: queries ``[B, H_k, T, K]``; without a ``feature_map``, features ``[B, H_k, T, F]``. ``H_k``
            divides ``H``: each head of keys serves the ``H / H_k`` heads of values beside one another.
        k: keys, like the queries.
        v: values ``[B, H, T, V]``.
        beta: the share of the old value that is replaced, ``[B, H, T]``, in ``[0, 1]``; up to 2 with
            keys of length 1, as the memory then still cannot grow.
        weights: the memory before the first token, ``[B, H, F, V]``.
        log_decay: the logarithm of the share of the memory that is left before a token reads or
            writes, at most 0, ``[B, H, T]``, or of each feature, ``[B, H, T, F]``, as in Kimi Delta
            Attention (None: all of it).
        feature_map: ``[..., K] -> [..., F]``, applied to queries and keys. Faster than applying it
            first: the chunked form saves a copy of the features, and the compiled loop skips the zeros
            of a :class:`~memspan.ops.fast_weights.feature_maps.DPFP`.
        chunking: how the work is divided (None: the defaults).
        implementation: a name from :data:`IMPLEMENTATIONS`; None: the first that can run.
        out: where the memory after the last token is written, like ``weights``, or ``weights`` itself:
            streams then read token after token in place. Without gradients. None: a new tensor.
        starts: bool ``[B, T]``: the memory is emptied before the token (None: never).

    Returns:
        ``y [B, H, T, V]`` and the memory after the last token, ``[B, H, F, V]``: ``out`` if given.

    Raises:
        MemspanError: shapes, types or devices do not go together; a ``log_decay`` is above 0, where
            looking waits for no device; ``out`` is given while gradients are recorded; the
            implementation does not exist or cannot run.
    """
    chunking = chunking or _CHUNKING
    inputs = RuleInputs(q, k, v, beta, weights, feature_map, chunking, log_decay, out, starts)
    read = None
    if starts is None and implementation in (None, "compiled"):
        read = _read_few(inputs)
    if read is None:
        # Only fla's kernels take a memory of another type.
        inputs.check(alike=implementation != "fla")
        with without_autocast(q):
            read = choose(IMPLEMENTATIONS, implementation, inputs)(inputs)
    y, after = read
    if out is None or after is out:
        return y, after
    if torch._debug_has_internal_overlap(out) == 1:
        raise MemspanError("out has numbers that share their place: pass a copy, out.clone()")
    return y, out.copy_(after)


def sum_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor,
    *,
    feature_map: FeatureMap | None = None,
    chunking: Chunking | None = None,
    implementation: str | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Read ``T`` tokens with the sum rule, linear attention (eq. 17) without its denominator.

    The denominator ``z . q``, with ``z' = z + k``, is the same recurrence with values of one: append
    a column of ones to ``v``, and ``z`` as a column to ``weights``.

    Arguments, results and errors are those of :func:`delta_rule`, without ``beta``.
    """
    chunking = chunking or _CHUNKING
    inputs = RuleInputs(q, k, v, None, weights, feature_map, chunking, starts=starts)
    inputs.check(alike=implementation != "fla")
    with without_autocast(q):
        return choose(IMPLEMENTATIONS, implementation, inputs)(inputs)


def outer_product_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor,
    *,
    activation: Literal["tanh", "identity"],
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Read ``T`` tokens with the rule of 1991, ``W' = f(W + k (x) v)``.

    A loop over tokens: the activation between them rules out a parallel form. Shapes, results and
    errors are those of :func:`delta_rule`; there are no other activations. ``lengths``, int64
    ``[B]``, are tokens of each row: padding after them does not change the memory (None: none).
    """
    from memspan.ops.fast_weights import reference

    check_name("activation", activation, "tanh", "identity")
    inputs = RuleInputs(q, k, v, None, weights, None, _CHUNKING, starts=starts)
    inputs.check()
    check_rows("lengths", lengths, torch.int64, "[B]", v.device, v.shape[0])
    with without_autocast(q):
        return reference.run(inputs, torch.tanh if activation == "tanh" else None, lengths)
