"""Tensors under several names in a model, such as a table that is embedding and output weights: torch
replaces them name by name, and they are to stay one."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import Tensor, nn


def tied_names(module: nn.Module) -> list[list[str]]:
    """The names of each parameter or buffer that has several."""
    names: dict[int, list[str]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            names.setdefault(id(tensor), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def tie(module: nn.Module, names: list[list[str]]) -> None:
    """Give all names of a list what the first of them stands for."""
    for first, *others in names:
        for name in others:
            owner, _, last = name.rpartition(".")
            setattr(module.get_submodule(owner), last, attrgetter(first)(module))


def expand_ties(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Add to the weights that ``module`` is about to load the names that they lack of what is tied.

    A hook, see :meth:`torch.nn.Module.register_load_state_dict_pre_hook`. All names of a tensor get the
    same one, the last that is given: with ``assign=True`` torch would make a Parameter for each.
    """
    for names in tied_names(module):
        own, names = attrgetter(names[0])(module), [prefix + name for name in names]
        if given := [state[name] for name in names if isinstance(state.get(name), Tensor)]:
            one = given[-1]
            if isinstance(own, nn.Parameter) and not isinstance(one, nn.Parameter):
                one = nn.Parameter(one, requires_grad=False)
            state.update(dict.fromkeys(names, one))
