"""The delta and the sum rule in C: by the loops in ``compiled.c``, with a decay or a map other than
DPFP by the chunks in ``chunks.h``, with a decay per feature by the loop of
:mod:`memspan.ops.delta_rules.compiled`. Single tokens through a whole stack: ``one_token.py``.

``README.md`` has the derivation.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import custom_op

from memspan.native import library
from memspan.native.threads import in_shares
from memspan.ops.delta_rules import compiled as loop
from memspan.ops.fast_weights.feature_maps import DPFP
from memspan.ops.fast_weights.rules import RuleInputs
from memspan.ops.first_derivatives import apply, first_derivatives_only

SOURCE = Path(__file__).with_suffix(".c")
SAVE_EVERY = 64
"""Tokens between two memories that are saved for backward."""
SAVE_EVERY_WITH_DECAY = 32
"""The same with a decay: each chunk's."""
SAVE_EVERY_RECOMPUTING = 256
"""The same with ``recompute``, with a decay or without."""
_LOADED = library.loaded_types(SOURCE)


def available(like: Tensor, bf16_weights: bool = False) -> bool:
    """True if the loops can run on tensors such as ``like``; ``bf16_weights``: steps with weights in
    bfloat16."""
    return library.available(SOURCE, like, bf16_weights, _LOADED)


def obstacle(inputs: RuleInputs) -> str | None:
    """Why the loops cannot run on these inputs; None if they can."""
    return None if available(inputs.v) else library.obstacle("chunked")


def run(inputs: RuleInputs) -> tuple[Tensor, Tensor]:
    """Maps other than DPFP are applied by PyTorch first, with a decay all: it reaches every feature.

    The loop gains by the zeros that it skips. Where there are none, the delta rule goes by chunks, with
    a decay of 1.
    """
    dense = not isinstance(inputs.feature_map, DPFP)
    if dense and inputs.beta is not None and inputs.log_decay is None:
        inputs = inputs._replace(log_decay=torch.zeros_like(inputs.beta))
    inputs = inputs.by_value_head() if inputs.log_decay is None else inputs.with_decay()
    if inputs.log_decay is not None and inputs.log_decay.dim() == 4:
        return loop.run(
            inputs.features(inputs.q),
            inputs.features(inputs.k),
            inputs.v,
            inputs.weights,
            beta=inputs.beta,
            log_decay=inputs.log_decay,
            recompute=inputs.chunking.recompute,
        )
    q = inputs.q
    k = inputs.k
    nu = 0
    epsilon = None
    if isinstance(inputs.feature_map, DPFP) and inputs.log_decay is None:
        nu = inputs.feature_map.nu
        epsilon = inputs.feature_map.epsilon
    else:
        q = inputs.features(q)
        k = inputs.features(k)
    save_every = SAVE_EVERY if inputs.log_decay is None else SAVE_EVERY_WITH_DECAY
    if inputs.chunking.recompute:
        save_every = SAVE_EVERY_RECOMPUTING
    tensors = [q, k, inputs.v, inputs.weights]
    tensors += [x for x in (inputs.beta, inputs.log_decay) if x is not None]
    starts = None if inputs.starts is None else inputs.starts.contiguous()
    if torch.compiler.is_compiling():
        saves = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        y, after, *_ = _operation(tensors, starts, nu, epsilon, save_every, saves)
    else:
        y, after = apply(_Rule, (nu, epsilon, save_every), starts, *tensors)
    return y, after


FEW = 8
"""Fewer tokens than these are faster one by one than as a chunk, as in ``token.h``."""
_FEW_TOKENS = struct.Struct("4q 8q")
"""``FewTokens`` in C."""


def read_few(inputs: RuleInputs) -> tuple[Tensor, Tensor] | None:
    """A token of the delta rule, or a few: checks one by one, a graph and views would take most of
    their time.

    None unless all is as it must be and nothing is recorded: :func:`run` serves everything else.
    """
    q, k, v, beta, before, feature_map, chunking, log_decay, out, _ = inputs
    if torch.compiler.is_compiling() or type(beta) is not Tensor:
        return None
    if feature_map is not None or chunking.size < 1:
        return None
    if log_decay is None:
        # As in run.
        log_decay = torch.zeros_like(beta)
    tensors = (q, k, v, beta, log_decay, before, before if out is None else out)
    if {*map(type, tensors)} != {Tensor} or _recorded(tensors):
        return None
    dtype = v.dtype
    sizes = (*q.shape, *v.shape[1::2])
    code = library.functions(SOURCE, dtype, False) if dtype in library.TYPES else None
    if code is None or len(sizes) != 6 or not sizes[2] < FEW or not q.numel() or not v.numel():
        return None
    batch, n_heads, steps, width, n_value_heads, value_width = sizes
    item = (batch, n_value_heads, steps)
    memory = (batch, n_value_heads, width, value_width)
    shapes = (q.shape, q.shape, (*item, value_width), item, item, memory, memory)
    for t, shape in zip(tensors, shapes, strict=True):
        if t.shape != shape or t.dtype is not dtype or not t.is_cpu:
            return None
    if n_value_heads % n_heads or log_decay.max().item() > 0:
        return None
    q, k, v, beta, log_decay, before = [t.contiguous() for t in tensors[:-1]]
    y = torch.empty_like(v)
    after = torch.empty_like(before) if out is None or not out.is_contiguous() else out
    given = [t.data_ptr() for t in (q, k, v, beta, log_decay, y, before, after)]
    few = (_FEW_TOKENS.pack(n_value_heads // n_heads, steps, width, value_width, *given),)
    in_shares(code.few_tokens, few, batch * n_heads, steps * before.numel())
    return y, after


def _recorded(tensors: Sequence[Tensor]) -> bool:
    """True if operations on these are recorded: for backward, forward mode or a transform."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return True
    return (
        forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None
    )


Options = tuple[int, float | None, int]
"""DPFP's ``nu`` (0: queries and keys are features already) and ``epsilon``; tokens between two saved
memories."""


_GIVEN = ("q", "k", "v", "before", "beta", "log_decay")


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, options: Options, starts: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        given = _in_order(tensors)
        y, after, errors, saved = _forward(given, starts, options, any(ctx.needs_input_grad))
        ctx.options = options
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given, errors, saved, starts)
        return y, after

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, d_y: Tensor | None, d_after: Tensor | None) -> tuple[Tensor | None, ...]:
        *given, errors, saved, starts = ctx.saved_tensors
        wanted = ctx.needs_input_grad[5]
        found = _backward(given, errors, saved, starts, ctx.options, d_y, d_after, wanted)
        return None, None, *found


def _in_order(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Queries, keys and values with each item contiguous, the memory contiguous, and the strengths."""
    q, k, v, before, *strengths = tensors
    return [*map(_side_by_side, (q, k, v)), before.contiguous(), *strengths]


def _new(
    given: Sequence[Tensor], save_every: int, saves: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised: ``y``, the memory after the last token, and for backward the delta rule's errors
    ``v - k W`` and the memory now and then."""
    v, before, *strengths = given[2:]
    y = _by_token(v)
    n_saved = (v.shape[2] - 1) // save_every if saves else 0
    saved = before.new_empty(*before.shape[:2], n_saved, *before.shape[2:])
    return y, before.new_empty(before.shape), y.new_empty(y.shape if strengths else 0), saved


def _forward(
    given: Sequence[Tensor], starts: Tensor | None, options: Options, saves: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All that :func:`_new` names, with ``saves`` for a backward pass."""
    found = _new(given, options[-1], saves)
    named = dict(zip(_GIVEN, given, strict=False))
    results = dict(zip(("y", "after", "errors", "saved"), found, strict=True))
    named |= {name: t for name, t in results.items() if t.numel()}
    if starts is not None:
        named["starts"] = starts
    _run("forward", named, options)
    return found


def _backward(
    given: Sequence[Tensor],
    errors: Tensor,
    saved: Tensor,
    starts: Tensor | None,
    options: Options,
    d_y: Tensor | None,
    d_after: Tensor | None,
    wants_before: bool,
) -> list[Tensor | None]:
    """Gradients of what is given; of the memory before the first token only if it is wanted, or the
    loops work in it, as they do without a decay."""
    v, before, *strengths = given[2:]
    decays = len(given) == len(_GIVEN)
    if d_y is None:
        d_y = _by_token(v).zero_()
    if d_after is None and not decays:
        d_after = torch.zeros_like(before)
    named = dict(zip(_GIVEN, given, strict=False))
    found = _new_gradients(given, wants_before or not decays)
    named |= {f"d_{name}": d for name, d in zip(named, found, strict=True) if d is not None}
    if strengths:
        named["errors"] = errors
    named |= {"saved": saved, "d_y": _side_by_side(d_y)}
    if d_after is not None:
        named["d_after"] = d_after.contiguous()
    if starts is not None:
        named["starts"] = starts
    _run("backward", named, options)
    return found


def _new_gradients(given: Sequence[Tensor], wants_before: bool) -> list[Tensor | None]:
    q, k, v, before, *strengths = given
    d_before = before.new_empty(before.shape) if wants_before else None
    return [*map(_by_token, (q, k, v)), d_before, *map(_by_token, strengths)]


def _side_by_side(x: Tensor) -> Tensor:
    """``x [B, H, T, K]``, copied only if the ``K`` numbers of an item are not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _by_token(like: Tensor) -> Tensor:
    """An uninitialised ``[B, H, T, ...]``, in memory ``[B, T, H, ...]`` as projections have it."""
    batch, n_heads, length = like.shape[:3]
    return like.new_empty(batch, length, n_heads, *like.shape[3:]).transpose(1, 2)


# ----- The same as one operation of a graph, for torch.compile. Eagerly the function above costs less.


def _graph_forward(
    tensors: list[Tensor],
    starts: Tensor | None,
    nu: int,
    epsilon: float | None,
    save_every: int,
    saves: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _forward(_in_order(tensors), starts, (nu, epsilon, save_every), saves)


def _graph_backward(
    tensors: list[Tensor],
    errors: Tensor,
    saved: Tensor,
    starts: Tensor | None,
    nu: int,
    epsilon: float | None,
    save_every: int,
    upstream: list[Tensor],
) -> list[Tensor]:
    given = _in_order(tensors)
    d_y, d_after = upstream
    options = (nu, epsilon, save_every)
    found = _backward(given, errors, saved, starts, options, d_y, d_after, True)
    return [d for d in found if d is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, starts, *ctx.options, _ = inputs
    ctx.save_for_backward(*tensors, *output[2:], starts)


def _graph_gradients(ctx: Any, d_y: Tensor, d_after: Tensor, *_: Tensor) -> tuple[Any, ...]:
    *tensors, errors, saved, starts = ctx.saved_tensors
    upstream = [d_y, d_after]
    found = _operation_backward(tensors, errors, saved, starts, *ctx.options, upstream)
    return found, None, *[None] * len(ctx.options), None


_SHARED = "Tensor? starts, int nu, float? epsilon, int save_every"
_operation = custom_op(
    "memspan::fast_weights_rule",
    _graph_forward,
    mutates_args=(),
    schema=f"(Tensor[] tensors, {_SHARED}, bool saves) -> (Tensor, Tensor, Tensor, Tensor)",
)
_operation.register_fake(lambda tensors, *rest: _new(tensors, *rest[-2:]))
_operation.register_autograd(_graph_gradients, setup_context=_save)
_operation_backward = custom_op(
    "memspan::fast_weights_rule_backward",
    _graph_backward,
    mutates_args=(),
    schema=f"(Tensor[] tensors, Tensor errors, Tensor saved, {_SHARED}, Tensor[] upstream) -> Tensor[]",
)
_operation_backward.register_fake(lambda tensors, *_: _new_gradients(tensors, True))


# ----- The call of the loops


_INTEGERS = (
    "n_heads", "share", "steps", "width", "value_width", "n_features", "nu", "normalises", "delta",
    "save_every",
)  # fmt: skip
_VIEWS = (
    "q", "k", "v", "beta", "log_decay", "y", "errors", "d_q", "d_k", "d_v", "d_beta", "d_log_decay",
    "d_y",
)  # fmt: skip
_MEMORIES = ("before", "d_after", "after", "d_before", "saved")
_LOOP = struct.Struct(f"{len(_INTEGERS)}q d q {4 * len(_VIEWS) + len(_MEMORIES)}q")
"""``Loop`` in C: integers, epsilon, starts, views and memories. A view, of a tensor ``[B, H, T, ...]``
of any strides, contiguous within an item, is its address and strides; what is missing has the address
0."""
_MISSING = (0, 0, 0, 0)


def _run(function: str, tensors: dict[str, Tensor], options: Options) -> None:
    """Over all heads of all rows, in as many threads as PyTorch may use."""
    code = library.functions(SOURCE, tensors["v"].dtype, False)
    assert code is not None
    batch, n_heads, steps, width = tensors["k"].shape
    n_features, value_width = tensors["before"].shape[2:]
    nu, epsilon, save_every = options
    integers = (
        n_heads,
        tensors["v"].shape[1] // n_heads,
        steps,
        width,
        value_width,
        n_features,
        nu,
        epsilon is not None,
        "beta" in tensors,
        save_every,
    )
    views: list[int] = []
    for name in _VIEWS:
        view = tensors.get(name)
        views += _MISSING if view is None else (view.data_ptr(), *view.stride()[:3])
    memories = [tensors[name].data_ptr() if name in tensors else 0 for name in _MEMORIES]
    starts = tensors["starts"].data_ptr() if "starts" in tensors else 0
    loop = _LOOP.pack(*integers, epsilon or 0.0, starts, *views, *memories)
    work = tensors["v"].numel() * n_features
    in_shares(getattr(code, function), (loop,), batch * n_heads, work)
