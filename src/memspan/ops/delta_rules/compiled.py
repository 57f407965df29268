"""The generalized delta rule in C, ``compiled.c``: a loop over tokens, forward and backward."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from memspan.native import library
from memspan.native.threads import in_shares
from memspan.ops.first_derivatives import apply, first_derivatives_only, refuse_transforms

SOURCE = Path(__file__).with_suffix(".c")
SAVE_EVERY = 32
"""Tokens between two memories that are saved for backward."""
SAVE_EVERY_RECOMPUTING = 256
"""The same with ``recompute``."""

_LOADED = library.loaded_types(SOURCE)


def available(like: Tensor, bf16_weights: bool = False) -> bool:
    """True if the loops can run on tensors such as ``like``; ``bf16_weights``: steps with weights in
    bfloat16."""
    return library.available(SOURCE, like, bf16_weights, _LOADED)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    before: Tensor,
    *,
    log_decay: Tensor | None = None,
    erase: Tensor | None = None,
    lookup: Tensor | None = None,
    beta: Tensor | None = None,
    recompute: bool = False,
) -> tuple[Tensor, Tensor]:
    """Read all tokens, see :func:`~memspan.ops.generalized_delta_rule`.

    Args:
        q: ``[B, H_k, T, K]``, where ``H_k`` divides ``H``: each head of keys serves the ``H / H_k``
            heads of values beside one another.
        k: the same of keys.
        beta: the delta rule's, ``[B, H, T]``, in place of ``erase`` and ``lookup``.
    """
    given = (q, k, v, before, log_decay, erase, lookup, beta)
    save_every = SAVE_EVERY_RECOMPUTING if recompute else SAVE_EVERY
    if torch.compiler.is_compiling():
        saves = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
        y, after, *_ = _operation(*given, save_every, saves)
    elif torch.is_grad_enabled():
        y, after = apply(_Rule, save_every, *given)
    else:
        refuse_transforms(*given)
        y, after, *_ = _forward(*given, save_every, False)
    return y, after


_GIVEN = ("q", "k", "v", "before", "log_decay", "erase", "lookup", "beta")
Given = Sequence[Tensor | None]


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, save_every: int, *given: Tensor | None) -> tuple[Tensor, Tensor]:
        y, after, found, saved = _forward(*given, save_every, any(ctx.needs_input_grad))
        ctx.save_every = save_every
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given, found, saved)
        return y, after

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, d_y: Tensor | None, d_after: Tensor | None) -> tuple[Tensor | None, ...]:
        *given, found, saved = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1 + _GIVEN.index("before")]
        return None, *_gradients(given, found, saved, ctx.save_every, d_y, d_after, wanted)


def _new(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised: ``y``, the memory after the last token, and for backward the values that were
    found and the memory now and then."""
    *given, save_every, saves = arguments
    _, _, v, before, _, erase, _, beta = given
    y = _by_token(v)
    n_saved = (v.shape[2] - 1) // save_every if saves else 0
    saved = before.new_empty(*before.shape[:2], n_saved, *before.shape[2:])
    looks = beta is not None or erase is not None
    found = y.new_empty(y.shape if looks and saves else 0)
    return y, before.new_empty(before.shape), found, saved


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All that :func:`_new` names. Arguments: what is given, ``save_every``, and whether there will be
    a backward pass."""
    *given, save_every, _ = arguments
    results = _new(*arguments)
    named = _named(*given)
    named |= dict(zip(("y", "after", "found", "saved"), results, strict=True))
    _call("forward", named, save_every)
    return results


def _gradients(
    given: Given,
    found: Tensor,
    saved: Tensor,
    save_every: int,
    d_y: Tensor | None,
    d_after: Tensor | None,
    wants_before: bool,
) -> list[Tensor | None]:
    """Gradients of what is given; that of the memory before the first token only if it is wanted."""
    named = _named(*given)
    gradients = _new_gradients(given, wants_before)
    for name, gradient in zip(_GIVEN, gradients, strict=True):
        if gradient is not None:
            named[f"d_{name}"] = gradient
    named |= {"found": found, "saved": saved}
    named["d_y"] = _by_token(named["v"]).zero_() if d_y is None else _side_by_side(d_y)
    if d_after is not None:
        named["d_after"] = d_after.contiguous()
    _call("backward", named, save_every)
    return gradients


def _named(*given: Tensor | None) -> dict[str, Tensor]:
    """Lay the tensors that are there, by name, and the memory out as C reads them: contiguous."""
    named = {name: t for name, t in zip(_GIVEN, given, strict=True) if t is not None}
    for name, tensor in named.items():
        if name == "before":
            named[name] = tensor.contiguous()
        elif tensor.dim() == 4:
            named[name] = _side_by_side(tensor)
    return named


def _new_gradients(given: Given, wants_before: bool) -> list[Tensor | None]:
    new: list[Tensor | None] = []
    for name, tensor in zip(_GIVEN, given, strict=True):
        if tensor is None or (name == "before" and not wants_before):
            new.append(None)
        else:
            new.append(tensor.new_empty(tensor.shape) if name == "before" else _by_token(tensor))
    return new


def _side_by_side(x: Tensor) -> Tensor:
    """``x [B, H, T, K]``, copied only if the ``K`` numbers of an item are not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _by_token(like: Tensor) -> Tensor:
    """An uninitialised ``[B, H, T, ...]``, in memory ``[B, T, H, ...]`` as projections have it."""
    batch, n_heads, length = like.shape[:3]
    return like.new_empty(batch, length, n_heads, *like.shape[3:]).transpose(1, 2)


# ----- The same as one operation of a graph, for torch.compile. Eagerly the function above costs less.

_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor before, Tensor? log_decay, Tensor? erase, Tensor? lookup, "
    "Tensor? beta"
)
_operation = custom_op(
    "memspan::generalized_delta_rule",
    _forward,
    mutates_args=(),
    schema=f"({_SCHEMA}, int save_every, bool saves) -> (Tensor, Tensor, Tensor, Tensor)",
)
_operation.register_fake(_new)


def _graph_backward(
    given: Given, found: Tensor, saved: Tensor, save_every: int, d_y: Tensor, d_after: Tensor
) -> list[Tensor]:
    gradients = _gradients(given, found, saved, save_every, d_y, d_after, True)
    return [gradient for gradient in gradients if gradient is not None]


_operation_backward = custom_op(
    "memspan::generalized_delta_rule_backward",
    _graph_backward,
    mutates_args=(),
    schema=(
        "(Tensor?[] given, Tensor found, Tensor saved, int save_every, Tensor d_y, Tensor d_after) "
        "-> Tensor[]"
    ),
)
_operation_backward.register_fake(
    lambda given, *_: [gradient for gradient in _new_gradients(given, True) if gradient is not None]
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *given, ctx.save_every, _ = inputs
    ctx.save_for_backward(*given, *output[2:])


def _graph_gradients(ctx: Any, d_y: Tensor, d_after: Tensor, *_: Tensor) -> tuple[Any, ...]:
    *given, found, saved = ctx.saved_tensors
    gradients = iter(_operation_backward(given, found, saved, ctx.save_every, d_y, d_after))
    return *(None if t is None else next(gradients) for t in given), None, None


_operation.register_autograd(_graph_gradients, setup_context=_save)


# ----- The call of the loops


_INTEGERS = ("n_heads", "share", "steps", "K", "V", "per_channel", "save_every")
_VIEWS = (
    "q", "k", "v", "log_decay", "erase", "lookup", "beta", "y", "found", "d_q", "d_k", "d_v",
    "d_log_decay", "d_erase", "d_lookup", "d_beta", "d_y",
)  # fmt: skip
_MEMORIES = ("before", "d_after", "after", "d_before", "saved")
_RULE = struct.Struct(f"{len(_INTEGERS) + 4 * len(_VIEWS) + len(_MEMORIES)}q")
"""``Rule`` in C: integers, views and memories. A view, of a tensor ``[B, H, T, ...]`` of any strides,
contiguous within an item, is its address and strides; what is missing has the address 0."""
_MISSING = (0, 0, 0, 0)


def _call(function: str, tensors: dict[str, Tensor], save_every: int) -> None:
    """Over all heads of all rows, in as many threads as PyTorch may use."""
    code = library.functions(SOURCE, tensors["v"].dtype, False)
    assert code is not None
    batch, n_heads, steps, width = tensors["k"].shape
    n_value_heads, value_width = tensors["v"].shape[1::2]
    per_channel = "log_decay" in tensors and tensors["log_decay"].dim() == 4
    share = n_value_heads // n_heads
    numbers = [n_heads, share, steps, width, value_width, per_channel, save_every]
    present = {name: t for name, t in tensors.items() if t.numel()}
    for name in _VIEWS:
        view = present.get(name)
        numbers += _MISSING if view is None else (view.data_ptr(), *view.stride()[:3])
    numbers += [present[name].data_ptr() if name in present else 0 for name in _MEMORIES]
    work = tensors["v"].numel() * width
    in_shares(getattr(code, function), (_RULE.pack(*numbers),), batch * n_heads, work)
