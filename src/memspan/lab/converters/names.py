"""A peer's tensors in terms of a model's parameters: one map, to read weights and to compare gradients.

Each of the peer's tensors is a concatenation of views of ours, along the rows. The map is complete in
both directions: :func:`fill` refuses a tensor that is left over, and a parameter that nothing fills.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from memspan.errors import MemspanError

Get = Callable[[Tensor], Tensor]
"""Maps one of our parameters to itself, its gradient, or another tensor with as many rows."""
Rows = Callable[[Get], list[Tensor]]
"""Views of ours that, concatenated along the rows, are the peer's tensor."""
Names = dict[str, Rows]
"""The peer's names. Tied parameters may have several."""


def whole(*parameters: Tensor) -> Rows:
    """A whole parameter, or several, first to last."""
    return lambda get: [get(parameter) for parameter in parameters]


def scalar(number: Tensor) -> Rows:
    """A tensor without dimensions, as one row."""
    return lambda get: [get(number).reshape(1)]


def upside_down(parameter: Tensor) -> Rows:
    """The rows from last to first."""
    return lambda get: [get(parameter)[i : i + 1] for i in reversed(range(len(parameter)))]


def module(name: str, ours: nn.Module) -> Names:
    """A module's own parameters, such as weight and bias, under the peer's name for it."""
    return {f"{name}.{key}": whole(value) for key, value in ours.named_parameters(recurse=False)}


def check(model: nn.Module, names: Names, tensors: Mapping[str, Tensor], where: str) -> None:
    """Refuse missing or superfluous tensors, and those of another type or shape than the model's, which
    is on the meta device. ``where``: the file that they come from, for messages."""
    if left_over := sorted(set(tensors) - set(names)):
        raise MemspanError(
            f"{where} has tensors that a model with these options lacks: {_listed(left_over)}; check "
            "that its options are this model's"
        )
    for name, tensor in tensors.items():
        like = torch.cat(names[name](lambda ours: ours.detach()))
        wanted = like.shape
        if like.is_floating_point() and not tensor.is_floating_point():
            raise MemspanError(f"{where}: {name} is of {tensor.dtype}: save it in floating point")
        if tensor.shape != wanted:
            raise MemspanError(
                f"{where}: {name} is {list(tensor.shape)}, but a model with these options needs "
                f"{list(wanted)}: check that its options are this model's"
            )
    values = sum(tensor.numel() for tensor in tensors.values())
    if values < sum(parameter.numel() for parameter in model.parameters()):
        raise _lacking(where, [name for name in names if name not in tensors])


@torch.no_grad()
def fill(model: nn.Module, names: Names, tensors: Mapping[str, Tensor], where: str) -> None:
    """Copy a peer's ``tensors``, which :func:`check` accepts, into ``model``."""
    filled: dict[int, Tensor] = {}

    def done(ours: Tensor) -> Tensor:
        return filled.setdefault(id(ours), torch.zeros(ours.shape[:1].numel(), dtype=torch.bool))

    for name, tensor in tensors.items():
        views = names[name](lambda ours: ours.data)
        marks = names[name](done)
        parts = tensor.split([len(view) for view in views])
        for view, mark, part in zip(views, marks, parts, strict=True):
            if mark.all() and not torch.equal(view, part.to(view.dtype)):
                raise MemspanError(
                    f"{where}: {name} differs from another tensor that these options tie to it: check "
                    "that its options are this model's"
                )
            view.copy_(part)
            if not view.isfinite().all():
                raise MemspanError(
                    f"{where}: {name} has values that are NaN, infinite or beyond float32: get an "
                    "earlier checkpoint, or the file again"
                )
            mark.fill_(True)
    missing = [
        name
        for name, rows in names.items()
        if name not in tensors and not all(mark.all() for mark in rows(done))
    ]
    if missing or not all(done(parameter).all() for parameter in model.parameters()):
        raise _lacking(where, missing)


def _lacking(where: str, missing: list[str]) -> MemspanError:
    return MemspanError(
        f"{where} lacks {_listed(missing)}: get the whole file, of a language model with its head"
    )


def _listed(names: list[str]) -> str:
    shown = ", ".join(name[:80] for name in names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
