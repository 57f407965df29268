"""Check that a kernel may stand in for modules, and that their weights have not changed since.

A kernel, such as a step in C or a function for a whole segment, computes with the weights of a tree of
modules, and calls none of them. For which tree it was written, its architecture declares as a
:class:`Schema`. Any other tree computes something else, whatever has made it another one: a subclass,
an adapter, a hook, a parametrisation. Then modules are called one by one, as the paper has it.
"""

from __future__ import annotations

import re
import threading
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
from memspan.models.known import ATTRIBUTES, METHODS, NAMES, known
from memspan.nn import FeedForward

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Tables of a module's hooks."""
GLOBAL_HOOKS: list[dict[int, Any]] = [getattr(torch_module, f"_global{name}") for name in HOOKS]
"""Torch's tables of hooks that all modules call: a kernel would skip them."""

PLAIN = (nn.Parameter, Tensor)
"""Tensors that kernels know; the latter within ``torch.func.functional_call``."""

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
    """Other attributes that its methods read, with the values that the kernel assumes."""


class Schema(dict[str, Part]):
    """A module and all those within, by name; not changed once it is made."""

    def __deepcopy__(self, memo: object) -> Schema:
        return self


def schema_of(module: nn.Module, names: str) -> Schema | None:
    """The schema of ``module``, which has just been made. None if kernels cannot know it: a class in it
    is not :func:`memspan.models.known.known`, or a part of it has a name that is not among ``names``.

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
    """Map names to shapes. A tensor of another class, such as a quantised weight, gets a value that
    equals no other, unless it was ``just_made``."""
    return {
        name: tensor.shape if just_made or type(tensor) in PLAIN else object()
        for name, tensor in tensors.items()
        if tensor is not None
    }


def are_joined(parts: Sequence[nn.Module]) -> bool:
    """Check that all are bias-free ``nn.Linear``s, so that their weights can be fused."""
    return all(
        is_itself(part, nn.Linear)
        and not (part._buffers or part._modules)
        and _sizes(part._parameters) == {"weight": (part.out_features, part.in_features)}
        for part in parts
    )


def is_exactly(module: nn.Module, schema: Schema) -> bool:
    """Check that ``module`` is the tree that ``schema`` describes: exact classes and names, sizes and
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
    """Check that ``module`` is of this very class, calls no hooks, and has no method of its own.
    The modules within it may be anything."""
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
        # Nor does torch 2.10 compile more than ``in`` of a module's ``vars``.
        and not any(name in own for name in NAMES[kind])
    )


_version = attrgetter("_version")


class Watch:
    """Notices that the tensors of ``roots`` have changed, which ends a reader's use.

    Changes in place raise a tensor's version; conversions such as ``module.float()``, and
    ``load_state_dict(assign=True)``, give it another address or put another tensor in its place. A
    fused optimiser does none of these, so torch is asked to report optimisers' steps while any watch
    lives. Writes through ``parameter.data``, new hooks and swapped modules are not noticed.
    """

    def __init__(self, *roots: nn.Module) -> None:
        modules = dict.fromkeys(part for root in roots for part in root.modules())
        places: list[tuple[dict[str, Any], str]] = [
            (table, name)
            for part in modules
            for table in (part._parameters, part._buffers)
            for name, tensor in table.items()
            if tensor is not None
        ]
        self._tables = [table for table, _ in places]
        self._names = [name for _, name in places]
        # Held, so that no other tensor gets their addresses or ids.
        self._tensors: list[Any] = list(map(dict.get, self._tables, self._names))
        self._versioned = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._versions = list(map(_version, self._versioned))
        self._addresses = list(map(Tensor.data_ptr, self._tensors))
        self.ids = set(map(id, self._tensors))
        self.changed = False
        _STEPS.report_to(self)

    def has_changed(self) -> bool:
        """Compare tensors, versions and addresses with those when this was made."""
        # By map, which is faster than a loop: this is asked for every token.
        if (
            any(map(is_not, map(dict.get, self._tables, self._names), self._tensors))
            or list(map(_version, self._versioned)) != self._versions
            or list(map(Tensor.data_ptr, self._tensors)) != self._addresses
        ):
            self.changed = True
        return self.changed

    def refuse_changes(self) -> None:
        """Raise :class:`StaleReaderError` if a tensor has changed."""
        if self.has_changed():
            raise StaleReaderError


def has_versions(module: nn.Module) -> bool:
    """Check that changes in place leave a trace: tensors made in inference mode have no versions."""
    return not any(t.is_inference() for t in (*module.parameters(), *module.buffers()))


class _Steps:
    """Reports optimisers' steps to living watches, by a hook that is registered while there are any."""

    def __init__(self) -> None:
        # A finaliser may run in a thread that holds the lock.
        self._lock = threading.RLock()
        self._living: dict[int, weakref.ref[Watch]] = {}
        self._hook: RemovableHandle | None = None

    def report_to(self, watch: Watch) -> None:
        """Set ``watch.changed`` after steps of its tensors, as long as it lives."""
        with self._lock:
            # Added first: a finaliser in between then leaves the hook.
            self._living[id(watch)] = weakref.ref(watch)
            weakref.finalize(watch, self._forget, id(watch)).atexit = False
            if self._hook is None:
                self._hook = register_optimizer_step_post_hook(self._report)

    def _forget(self, number: int) -> None:
        with self._lock:
            del self._living[number]
            if not self._living and self._hook is not None:
                self._hook.remove()
                self._hook = None

    def _report(self, optimiser: torch.optim.Optimizer, *_: object) -> None:
        # Torch's own change nothing without a gradient; others may need none, or drop it.
        parameters = (p for group in optimiser.param_groups for p in group["params"])
        torchs = type(optimiser).__module__.startswith("torch.")
        stepped = {id(p) for p in parameters if p.grad is not None or not torchs}
        with self._lock:
            watches = [reference() for reference in self._living.values()]
        for watch in watches:
            if watch is not None and not stepped.isdisjoint(watch.ids):
                watch.changed = True


_STEPS = _Steps()
