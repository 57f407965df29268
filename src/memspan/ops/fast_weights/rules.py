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
``compiled.py``, the loop over tokens in C, with a decay chunks in C. ``fla.py`` hands the delta rule to
another library's kernels. Derived in ``docs/annotated/delta_rule.md``.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from memspan.ops.fast_weights.feature_maps import FeatureMap
from memspan.ops.fast_weights.inputs import Chunking, RuleInputs
from memspan.ops.implementations import Implementation, choose

# Imported when they are first asked: whoever takes one rule home need not take all.


def _compiled(inputs: RuleInputs) -> tuple[Tensor, Tensor]:
    from memspan.ops.fast_weights import compiled

    return compiled.run(inputs)


def _compiled_obstacle(inputs: RuleInputs) -> str | None:
    from memspan.ops.fast_weights import compiled

    return compiled.obstacle(inputs)


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
    # Graphs of torch.compile are better off with chunks, which it can fuse and move to any device.
    "compiled": Implementation(
        _compiled, _compiled_obstacle, suits=lambda inputs: not torch.compiler.is_compiling()
    ),
    "chunked": Implementation(_chunked),
    "fla": Implementation(_fla, _fla_obstacle, suits=lambda inputs: False),
    "reference": Implementation(_reference),
}
"""By preference. ``compiled``: the loop in C, on a CPU, in float32 or float64, with a C compiler.
``chunked``: PyTorch, on any device. ``fla``: only by name, on CUDA, in bfloat16, never run there yet.
``reference``: plain autograd, for ``torch.func``, ``vmap`` and gradients of gradients."""


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
            writes, ``[B, H, T]``, at most 0 (None: all of it).
        feature_map: ``[..., K] -> [..., F]``, applied to queries and keys. Faster than applying it
            first: the chunked form saves a copy of the features, and the compiled loop skips the zeros
            of a :class:`~memspan.ops.fast_weights.feature_maps.DPFP`.
        chunking: how the work is divided (None: the defaults).
        implementation: a name from :data:`IMPLEMENTATIONS`; None: the first that can run.

    Returns:
        ``y [B, H, T, V]`` and the memory after the last token, ``[B, H, F, V]``.

    Raises:
        MemspanError: shapes, types or devices do not go together; a ``log_decay`` is above 0, where
            looking waits for no device; the implementation does not exist or cannot run.
    """
    inputs = RuleInputs(q, k, v, beta, weights, feature_map, chunking or Chunking(), log_decay)
    # Only fla's kernels take a memory of another type.
    inputs.check(alike=implementation != "fla")
    return choose(IMPLEMENTATIONS, implementation, inputs)(inputs)


def sum_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor,
    *,
    feature_map: FeatureMap | None = None,
    chunking: Chunking | None = None,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Read ``T`` tokens with the sum rule, linear attention (eq. 17) without its denominator.

    The denominator ``z . q``, with ``z' = z + k``, is the same recurrence with values of one: append
    a column of ones to ``v``, and ``z`` as a column to ``weights``.

    Arguments, results and errors are those of :func:`delta_rule`, without ``beta``.
    """
    inputs = RuleInputs(q, k, v, None, weights, feature_map, chunking or Chunking())
    inputs.check(alike=implementation != "fla")
    return choose(IMPLEMENTATIONS, implementation, inputs)(inputs)


def outer_product_rule(
    q: Tensor, k: Tensor, v: Tensor, weights: Tensor, *, activation: Literal["tanh", "identity"]
) -> tuple[Tensor, Tensor]:
    """Read ``T`` tokens with the rule of 1991, ``W' = f(W + k (x) v)``.

    A loop over tokens: the activation between them rules out a parallel form. Shapes, results and
    errors are those of :func:`delta_rule`.
    """
    from memspan.ops.fast_weights import reference

    RuleInputs(q, k, v, None, weights, None, Chunking()).check()
    outputs = []
    for q_t, k_t, v_t in zip(q.unbind(2), k.unbind(2), v.unbind(2), strict=True):
        weights = weights + reference.outer(k_t, v_t)
        if activation == "tanh":
            weights = weights.tanh()
        outputs.append(reference.read(q_t, weights))
    return torch.stack(outputs, 2), weights
