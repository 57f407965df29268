"""The only place that says whether a kernel may stand in for modules, and whether it still may.

A kernel, such as a step in C or a function for a whole segment, computes with the weights of a tree of
modules, and calls none of them. For which tree it was written, its architecture declares as a
:class:`Schema`. Any other tree computes something else, whatever has made it another one: a subclass,
an adapter, a hook, a parametrisation. Then modules are called one by one, as the paper has it.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping, Sequence
from operator import attrgetter, is_not
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from memspan.errors import StaleReaderError
from memspan.nn import ATTRIBUTES, METHODS, NAMES, FeedForward, known

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Two that count in reading, and two that count only where there are gradients."""
GLOBAL_HOOKS: list[dict[int, Any]] = [getattr(torch_module, f"_global{name}") for name in HOOKS]
"""Torch's, for all modules: its tables live as long as torch does."""

PLAIN = (nn.Parameter, Tensor)
"""Tensors that kernels know; the latter within ``torch.func.functional_call``."""

SAMPLES = 256
"""Numbers of each tensor that a reader compares, about."""

for _kind, _attributes in {
    nn.Linear: (),
    nn.LayerNorm: ("eps", "normalized_shape"),
    nn.RMSNorm: ("eps", "normalized_shape"),
    nn.Identity: (),
    nn.Dropout: (),
    nn.ModuleList: (),
    nn.LSTM: ("num_layers", "bidirectional", "proj_size", "batch_first"),
    FeedForward: ("activation",),
}.items():
    known(*_attributes)(_kind)

STACK = r"""
    dropout | final_norm(.weight|.bias)?
    | layers.\d+.(dropout | feed_forward.dropout | attention_norm)
    | layers.\d+.(\w+_norm | feed_forward.(inner|outer)).(weight|bias)
"""
"""Names in a stack of layers, see :func:`schema_of`."""


class Part(NamedTuple):
    """A module as a kernel knows it, without those within."""

    kind: type
    parameters: dict[str, object]
    """Their sizes."""
    buffers: dict[str, object]
    attributes: dict[str, object]
    """What its methods read beside them, with the values that the kernel assumes."""


class Schema(dict[str, Part]):
    """A module and all those within, by name; not changed once it is made."""

    def __deepcopy__(self, memo: object) -> Schema:
        return self


def schema_of(module: nn.Module, names: str) -> Schema | None:
    """The schema of ``module``, which has just been made. None if kernels cannot know it: a class in it
    is not :func:`memspan.nn.known`, or a part of it has a name that is not among ``names``.

    ``names``: those of all parameters and buffers that kernels know, and of modules without either: a
    regular expression, in which spaces do not count.
    """
    parts = dict(module.named_modules(remove_duplicate=False))
    if not {type(part) for part in parts.values()} <= METHODS.keys():
        return None
    found = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    found += [name for name, part in parts.items() if not [*part.parameters(), *part.buffers()]]
    expected = re.compile(names, re.VERBOSE)
    if not all(map(expected.fullmatch, found)):
        return None
    return Schema((name, _part(part, True)) for name, part in parts.items())


def _part(module: nn.Module, just_made: bool = False) -> Part:
    kind = type(module)
    return Part(
        kind,
        _sizes(module._parameters, just_made),
        _sizes(module._buffers, just_made),
        {name: getattr(module, name, None) for name in ATTRIBUTES[kind]},
    )


def _sizes(tensors: Mapping[str, Tensor | None], just_made: bool = False) -> dict[str, object]:
    """By name; of a quantised weight or another tensor of a class of its own, what equals nothing,
    unless it was ``just_made``, without numbers."""
    return {
        name: tensor.shape if just_made or type(tensor) in PLAIN else object()
        for name, tensor in tensors.items()
        if tensor is not None
    }


def are_joined(parts: Sequence[nn.Module]) -> bool:
    """Whether all are torch's own products without a bias, whose weights may then be one matrix."""
    return all(
        is_itself(part, nn.Linear)
        and not (part._buffers or part._modules)
        and _sizes(part._parameters) == {"weight": (part.out_features, part.in_features)}
        for part in parts
    )


def is_exactly(module: nn.Module, schema: Schema) -> bool:
    """Whether ``module`` is the tree that ``schema`` describes: exact classes and names, sizes and
    attributes, neither hooks nor methods of its own, parameters of one type, one mode for training."""
    parts = dict(module.named_modules(remove_duplicate=False))
    # Not by module.parameters(), which takes half as long as all else.
    parameters = (p for part in parts.values() for p in part._parameters.values() if p is not None)
    return (
        not any(GLOBAL_HOOKS)
        and parts.keys() == schema.keys()
        and all(map(_is_as_defined, {part.kind for part in schema.values()}))
        and all(
            _is_untouched(part, schema[name].kind) and _part(part) == schema[name]
            for name, part in parts.items()
        )
        and len({part.training for part in parts.values()}) == 1
        and len({p.dtype for p in parameters}) < 2
    )


def is_itself(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether ``module`` is of this class and no other, calls no hooks, and has no method of its own;
    what is within it may be anything."""
    return not any(GLOBAL_HOOKS) and _is_as_defined(kind) and _is_untouched(module, kind)


def _is_as_defined(kind: type[nn.Module]) -> bool:
    return all(getattr(kind, name) is method for name, method in METHODS[kind].items())


def _is_untouched(module: nn.Module, kind: type[nn.Module]) -> bool:
    own = vars(module)
    return (
        type(module) is kind
        # One by one, since this is asked of every module.
        and not own["_forward_pre_hooks"]
        and not own["_forward_hooks"]
        and not own["_backward_pre_hooks"]
        and not own["_backward_hooks"]
        and NAMES[kind].isdisjoint(own)
    )


def _present(members: Mapping[str, Any]) -> dict[str, Any]:
    return {name: member for name, member in members.items() if member is not None}


_version = attrgetter("_version")


class Watch:
    """Notices that the weights under ``roots`` have changed, in time for the next token.

    Changes in place raise a tensor's version, and conversions such as ``module.float()`` replace its
    storage. Fused optimisers do neither, but torch says when one has made a step, and when a tensor or
    module is put into any other. What writes through ``parameter.data`` tells nobody.

    ``replaced``: a kernel stands in for the modules, which have schemas. A single token notices hooks
    and modules that were put in: torch counts them. A whole look, for several tokens, notices classes
    and attributes, too, and on a CPU what was written through ``parameter.data`` throughout a tensor.
    """

    def __init__(self, *roots: nn.Module, replaced: bool = False) -> None:
        self.modules = list({part: None for root in roots for part in root.modules()})
        places: list[tuple[dict[str, Any], str]] = [
            (table, name)
            for part in self.modules
            for table in (part._parameters, part._buffers, part._modules)
            for name in _present(table)
        ]
        self._kinds = [type(part) for part in self.modules if replaced]
        self._own = [vars(part) for part in self.modules if replaced]
        self._n_attributes = list(map(len, self._own))
        for own, kind in zip(self._own, self._kinds, strict=True):
            assumed = "training", "_parameters", "_modules", *ATTRIBUTES[kind]
            places += [(own, name) for name in assumed]
        self._homes = [table for table, _ in places], [name for _, name in places]
        # Held, so that no other tensor gets their addresses or ids.
        self._members = self._at_home()
        self._tensors = [member for member in self._members if isinstance(member, Tensor)]
        self.ids, self.changed = set(map(id, self._tensors)), False
        # What was made in inference mode has no versions.
        self._versioned = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._versions = list(map(_version, self._versioned))
        self._addresses = list(map(Tensor.data_ptr, self._tensors))
        self._strides = list(map(Tensor.stride, self._tensors))
        self._samples = [torch.empty(0), *map(_sample, self._tensors if replaced else ())]
        self._values = self._sampled()
        self._registered = _registered()
        _WATCHES.add(self)

    def sees_additions(self) -> bool:
        """Whether something was put into a module since the last look, in this model or in another."""
        return self._registered != _registered()

    def has_changed(self, whole: bool) -> bool:
        """``whole``: look at all that there is, which takes too long for a single token."""
        if not self.changed:
            self.changed = self._is_changed(whole or len(self._versioned) < len(self._tensors))
        return self.changed

    def refuse_changes(self, whole: bool) -> None:
        """Raise :class:`StaleReaderError` if something has changed."""
        if self.has_changed(whole):
            raise StaleReaderError

    def _is_changed(self, whole: bool) -> bool:
        if self.sees_additions():
            whole, self._registered = True, _registered()
            if self._own and (any(GLOBAL_HOOKS) or any(o[h] for o in self._own for h in HOOKS[:2])):
                return True
        # By map, which is faster than a loop.
        return (
            list(map(_version, self._versioned)) != self._versions
            or list(map(Tensor.data_ptr, self._tensors)) != self._addresses
            or (whole and self._has_strayed())
        )

    def _has_strayed(self) -> bool:
        """Looks for what torch does not count."""
        return (
            any(map(is_not, self._at_home(), self._members))
            or list(map(Tensor.stride, self._tensors)) != self._strides
            or (bool(self._own) and self._are_others())
        )

    def _are_others(self) -> bool:
        """Whether modules have got other classes, methods, or values that torch does not count; new
        attributes that are not methods do not count."""
        before, self._n_attributes = self._n_attributes, list(map(len, self._own))
        return (
            list(map(type, self.modules)) != self._kinds
            or not all(map(_is_as_defined, set(self._kinds)))
            or (
                before != self._n_attributes
                and not all(map(_is_untouched, self.modules, self._kinds))
            )
            or not torch.equal(self._sampled(), self._values)
        )

    def _at_home(self) -> list[Any]:
        return list(map(dict.get, *self._homes))

    def _sampled(self) -> Tensor:
        # As bytes: a NaN is not equal to itself.
        return torch.cat(self._samples).view(torch.uint8)


def _sample(tensor: Tensor) -> Tensor:
    """Some numbers of a tensor, evenly spread: to compare all of them would take a good part of what it
    takes to compute with them. None of one on a GPU, since looking would wait."""
    if tensor.device.type != "cpu" or not tensor.numel():
        return torch.empty(0)
    size = 1 + sum((n - 1) * by for n, by in zip(tensor.shape, tensor.stride(), strict=True))
    # An odd step meets all columns of a matrix in turn.
    step = (size // SAMPLES) | 1
    return tensor.detach().as_strided((-(-size // step),), (step,))


_WATCHES: weakref.WeakSet[Watch] = weakref.WeakSet()


def _note_step(optimiser: torch.optim.Optimizer, *_: object) -> None:
    """Torch calls this after every step of any optimiser. Its own change nothing without a gradient;
    others may need none, or drop it."""
    if not _WATCHES:
        return
    parameters = (p for group in optimiser.param_groups for p in group["params"])
    torchs = type(optimiser).__module__.startswith("torch.")
    stepped = {id(p) for p in parameters if p.grad is not None or not torchs}
    for watch in list(_WATCHES):
        watch.changed = watch.changed or not stepped.isdisjoint(watch.ids)


register_optimizer_step_post_hook(_note_step)
_REGISTERED = [0]
"""How many modules, parameters and buffers were put into others."""


def _note_registration(*_: object) -> None:
    _REGISTERED[0] += 1


def _registered() -> tuple[int, int]:
    """Counts that rise with everything that is put into a module: hooks have the second one."""
    return _REGISTERED[0], RemovableHandle.next_id


torch_module.register_module_module_registration_hook(_note_registration)
torch_module.register_module_parameter_registration_hook(_note_registration)
torch_module.register_module_buffer_registration_hook(_note_registration)
