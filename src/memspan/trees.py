"""Base class of layers' memories; memories, outputs and options as trees of tensors, for
``torch.export``, ``torch.func`` and ``torch.utils._pytree.tree_map``."""

from __future__ import annotations

import importlib
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch.serialization import add_safe_globals
from torch.utils import _pytree as pytree

from memspan.calls import names_checked
from memspan.errors import MemspanError, counted

T = TypeVar("T", bound=type)
L = TypeVar("L", bound="LayerMemory")


def tree(kind: T) -> T:
    """Register a dataclass: its fields are the leaves, or trees themselves. A decorator.

    ``torch.load`` accepts it without being told to.
    """

    def flatten(value: Any) -> tuple[list[Any], list[str]]:
        # "compressed_length" before "compressed": torch.export puts the leaves' names in its checks by
        # replacing one after the other, wherever they occur. A list, as JSON gives it back: a saved
        # export compares it with what it is called with.
        names = sorted((field.name for field in fields(value)), reverse=True)
        return [getattr(value, name) for name in names], names

    def with_keys(value: Any) -> tuple[list[tuple[pytree.KeyEntry, Any]], list[str]]:
        leaves, names = flatten(value)
        return [(pytree.GetAttrKey(n), x) for n, x in zip(names, leaves, strict=True)], names

    def unflatten(leaves: Iterable[Any], names: Iterable[str]) -> Any:
        # Past the checks: leaves may be anything, such as sizes.
        value: Any = object.__new__(kind)
        for name, leaf in zip(names, leaves, strict=True):
            object.__setattr__(value, name, leaf)
        return value

    pytree.register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
        flatten_with_keys_fn=with_keys,
    )
    add_safe_globals([kind])
    return kind


def constant(kind: type) -> None:
    """Register a class of options: a tree without leaves, since options are not tensors."""
    if kind not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(
            kind, _nothing_of, lambda _, options: options, flatten_with_keys_fn=_nothing_of
        )


def _nothing_of(options: Any) -> tuple[list[Any], Any]:
    return [], options


@dataclass(frozen=True, repr=False)
class LayerMemory:
    """Memory of one layer between segments: a frozen dataclass whose fields are all tensors.

    Every field has the batch first, a fixed size, and all-zero rows where nothing was read. None of the
    operations changes the memory it is called on: to branch a stream, keep the old value.

    Two memories are equal if they are of one class and their tensors have the same values, types,
    sizes and devices. As the values may change in place, a memory has no hash.
    """

    def __init_subclass__(cls) -> None:
        # Dataclasses would make their own, which compare tuples of tensors and hash their addresses.
        cls.__eq__ = LayerMemory.__eq__  # type: ignore[method-assign]
        cls.__hash__ = LayerMemory.__hash__  # type: ignore[method-assign]
        tree(cls)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        theirs = other.tensors()  # type: ignore[attr-defined]
        return all(_equal(tensor, theirs[name]) for name, tensor in self.tensors().items())

    def __hash__(self) -> int:
        raise TypeError(
            f"{described(self)} has no hash, as its tensors may change: use a key of your own, "
            "such as the stream's name"
        )

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        # Rows that were picked from a larger memory are pickled without the others.
        fields = {name: _alone(tensor) for name, tensor in self.tensors().items()}
        return _unpickled, (type(self).__module__, type(self).__qualname__, fields)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        tensors = self.tensors().values()
        if any(memo.get(id(tensor)) is tensor for tensor in tensors):
            # Lightning's apply_to_collection would set the fields of the copy afterwards.
            raise MemspanError(
                f"the fields of a {type(self).__name__} are not set one by one: put memory.tensors(), "
                f"a dict, in its place, and make a memory of it by {type(self).__name__}(**fields)"
            )
        if any(tensor.grad_fn is not None for tensor in tensors):
            raise MemspanError(
                "a memory that is part of a graph cannot be deep-copied: copy memory.detach()"
            )
        return self.map(lambda t: t.detach().clone().requires_grad_(t.requires_grad))

    def __post_init__(self) -> None:
        """Refuse fields that the operations below do not know: anything but dense tensors."""
        for name, value in self.tensors().items():
            if not isinstance(value, Tensor):
                raise MemspanError(f"a memory's {name} must be a tensor, not {reprlib.repr(value)}")
            if value.layout != torch.strided or value.is_nested:
                kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
                raise MemspanError(f"a memory's {name} must be a dense tensor, not a {kind} one")

    @classmethod
    def zeros(cls, weight: Tensor, rows: int, sizes: Mapping[str, tuple[int, ...]]) -> Self:
        """An empty memory with fields of these ``sizes`` per row, on the device and of the type of
        ``weight``, but at least float32; a field of size ``()`` is int64."""
        real = torch.promote_types(weight.dtype, torch.float32)
        fields = {
            name: zeros_for(weight, rows, *size, dtype=real if size else torch.int64)
            for name, size in sizes.items()
        }
        return cls(**fields)

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The memory with ``function`` applied to every field."""
        return replace(self, **{name: function(tensor) for name, tensor in self.tensors().items()})

    def detach(self) -> Self:
        """Cut the memory from the graph: truncated backpropagation through time."""
        return self.map(Tensor.detach)

    def to(
        self,
        device: torch.device | str | torch.dtype | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Move to a device; ``dtype`` applies to floating-point fields only.

        As for a tensor, the dtype may stand alone: ``memory.to(torch.bfloat16)``.

        Raises:
            MemspanError: the type is not a floating-point type.
        """
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        if dtype is not None and not dtype.is_floating_point:
            raise MemspanError(f"a memory is kept in a floating-point type, not in {named(dtype)}")
        return self.map(lambda t: t.to(device, dtype if t.is_floating_point() else None))

    @names_checked
    def select(self, rows: Tensor | list[int]) -> Self:
        """Pick, repeat or reorder rows: beam search, batch surgery. ``rows``: integers ``[B']``.

        Raises:
            MemspanError: a row does not exist; on a GPU torch itself raises.
        """
        wanted = f"select needs row numbers in 0 .. {self.batch_size - 1}"
        index = per_row(rows, torch.int64, wanted, self.device)
        try:
            return self.map(lambda t: t.index_select(0, index))
        except IndexError:
            raise MemspanError(f"{wanted}, not {index.tolist()}") from None

    def __getitem__(self, rows: int | slice | Tensor | list[int] | list[bool]) -> Self:
        """Rows by index, as in a tensor, but an ``int`` keeps the batch: ``memory[-1]``,
        ``memory[2:]``, ``memory[[0, 0]]``, ``memory[mask]``.

        Raises:
            IndexError: a row does not exist.
            MemspanError: these are not rows.
        """
        if not isinstance(rows, int | slice):
            rows = _row_index(rows)
        if isinstance(rows, int) and not isinstance(rows, bool):
            rows = range(self.batch_size)[rows]
            rows = slice(rows, rows + 1)
        if isinstance(rows, bool) or (isinstance(rows, slice) and (rows.step or 1) < 1):
            raise _not_rows(rows)
        return self.map(lambda t: t[rows])

    def __len__(self) -> int:
        return self.batch_size

    @names_checked
    def reset(self, mask: Tensor | list[bool]) -> Self:
        """Empty the rows where ``mask`` (bool ``[B]``) is true; the others are untouched.

        An empty row has nothing to attend to, also where ``initial_memory`` had ``start="zeros"``.

        Raises:
            MemspanError: the mask is not one bool per row.
        """
        empty = row_mask(mask, self.batch_size, self.device)
        # Not a multiplication, which would keep NaN.
        return self.map(
            lambda t: torch.where(empty.view(-1, *[1] * (t.dim() - 1)), t.new_zeros(()), t)
        )

    @names_checked
    def where(self, mask: Tensor, other: Self) -> Self:
        """This memory's rows where ``mask`` (bool ``[B]``) is true, those of ``other`` elsewhere."""
        fields = other.tensors()
        return replace(
            self,
            **{
                name: torch.where(mask.view(-1, *[1] * (t.dim() - 1)), t, fields[name])
                for name, t in self.tensors().items()
            },
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({counted(self.batch_size, 'row')}, {self.nbytes:,} bytes)"

    @property
    def batch_size(self) -> int:
        """Rows, B."""
        return next(iter(self.tensors().values())).shape[0]

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return next(iter(self.tensors().values())).device

    @property
    def nbytes(self) -> int:
        """Size in bytes; independent of the number of tokens read."""
        return sum(t.nbytes for t in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """All fields by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def _row_index(rows: object) -> int | Tensor:
    """Rows as one number, or as a tensor of numbers or of bools."""
    try:
        index = torch.as_tensor(rows)
    except (TypeError, ValueError, RuntimeError):
        raise _not_rows(rows) from None
    if not index.numel():
        # An empty list does not have a type.
        index = index.long()
    if index.is_floating_point() or index.is_complex() or index.dim() > 1:
        raise _not_rows(rows)
    if index.dim():
        return index
    return index.item()  # type: ignore[return-value]


def _not_rows(rows: object) -> MemspanError:
    return MemspanError(
        "rows of a memory are picked by a number, a slice, a list of numbers or one bool per row, not "
        f"by {reprlib.repr(rows)}"
    )


def _unpickled(module: str, name: str, fields: dict[str, Tensor]) -> LayerMemory:
    """A memory from its pickle. ``torch.load`` may call this before any model is made: memspan's own
    classes are imported here, and no other module is."""
    if module.startswith("memspan.models."):
        importlib.import_module(module)
    kind: Any = sys.modules.get(module)
    for part in name.split("."):
        kind = getattr(kind, part, None)
    if not (isinstance(kind, type) and issubclass(kind, LayerMemory)):
        raise MemspanError(f"this is a memory of class {module}.{name}: import {module} first")
    if set(fields) != set(kind.__dataclass_fields__):
        raise MemspanError(
            f"a {name} has other fields than {sorted(fields)}: load it with the version that pickled it"
        )
    return kind(**fields)


add_safe_globals([_unpickled])


def _equal(one: Tensor, other: Tensor) -> bool:
    """True if two tensors have the same values, type, size and device; without values, are the same."""
    if (one.dtype, one.shape, one.device) != (other.dtype, other.shape, other.device):
        return False
    return one is other if one.is_meta else torch.equal(one, other)


def _alone(tensor: Tensor) -> Tensor:
    """``tensor``, copied if it is a small part of a larger one."""
    return tensor if tensor.untyped_storage().nbytes() <= tensor.nbytes else tensor.clone()


def zeros_for(weight: Tensor, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
    """Zeros where ``weight`` is, of its type (None) or another ``dtype``. Not ``weight.new_zeros``,
    which is a DTensor where FSDP2 has sharded the weight, and goes with no plain tensor."""
    return torch.zeros(sizes, dtype=dtype or weight.dtype, device=weight.device)


def recordable(memory: L) -> L:
    """``memory``, copied where autograd could not keep it for backward: if it was made in torch's
    inference mode and gradients are recorded now."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return memory
    if not any(tensor.is_inference() for tensor in memory.tensors().values()):
        return memory
    return memory.map(torch.clone)


def a_weight(layer: Any) -> Tensor:
    """A parameter, whose device and type are the layer's. Quantised layers may have none: they take
    float32 on a CPU."""
    return next(layer.parameters(), torch.empty(0, dtype=torch.float32))


def check_config(module: object, config: object, kind: str) -> None:
    """Refuse to make ``module`` of anything but options of this ``kind``: the name of their class,
    which a layer that is taken home does not import."""
    if kind not in (each.__name__ for each in type(config).__mro__):
        raise MemspanError(
            f"a {type(module).__name__} is made of options, such as {kind}(d_model=64), not of "
            f"{reprlib.repr(config)}"
        )


def check_layer(layer: Any, x: Tensor, width: int, memory: L | None) -> L:
    """Refuse an ``x`` that is not ``[B, T, D]`` with ``D = width``, ``T >= 1``, on the layer's device
    and of its type, and a memory that is not the layer's, with as many rows. Returns the memory to read
    on from, in the types of the layer's own, however it was stored; an empty one for None."""
    if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[2] != width or not x.shape[1]:
        found = form(x) if isinstance(x, Tensor) else type(x).__name__
        raise MemspanError(f"x must be [B, T, {width}] with at least one token, not {found}")
    weight = a_weight(layer)
    if x.device != weight.device:
        raise MemspanError(f"x is on {x.device} and the layer on {weight.device}: move one of them")
    if not suits(x, weight):
        raise MemspanError(f"x must be {named(weight.dtype)} as the layer is, not {named(x.dtype)}")
    if memory is None:
        empty: L = layer.initial_memory(x.shape[0])
        return empty
    like = layer.initial_memory(0)
    check_like(memory, like, x.shape[0], x.device)
    own = like.tensors()
    stored = memory.tensors()
    if any(t.dtype != own[name].dtype for name, t in stored.items()):
        memory = replace(memory, **{name: t.to(own[name].dtype) for name, t in stored.items()})
    return recordable(memory)


def check_like(
    memory: object, like: LayerMemory, rows: int | None, device: torch.device | None = None
) -> None:
    """Refuse a memory of another kind or with other sizes than ``like``, or with another number of
    rows than ``rows`` (None: any number); see also :func:`check_field`."""
    check_kind(memory, type(like))
    for name, t in like.tensors().items():
        check_field(name, getattr(memory, name), t.dtype, (rows, *t.shape[1:]), device)


def check_kind(memory: object, kind: type) -> None:
    """Refuse anything but a memory of this class."""
    if type(memory) is not kind:
        raise MemspanError(
            f"the memory must be a {kind.__name__}, not {described(memory)}: use one "
            "from initial_memory or from a pass of this model"
        )


def described(value: object) -> str:
    """Describe a value for an error message."""
    if isinstance(value, Tensor):
        return f"a tensor of {named(value.dtype)} {list(value.shape)} on {value.device}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def check_field(
    name: str,
    field: Tensor,
    dtype: torch.dtype,
    shape: Sequence[int | None],
    device: torch.device | None = None,
) -> None:
    """Refuse a memory's field of another shape (None: any size), of another type (all floating-point
    types are accepted alike), or on another device (None: any that holds values)."""
    if field.is_floating_point() and dtype.is_floating_point:
        dtype = field.dtype
    sizes = zip(field.shape, shape, strict=False)
    if (
        field.dtype == dtype
        and len(field.shape) == len(shape)
        # Not by `in`: while torch compiles, a symbolic size is in no tuple.
        and all(wanted is None or wanted == size for size, wanted in sizes)
        and (field.device == device if device is not None else not field.is_meta)
    ):
        return
    listed = ", ".join("any" if size is None else str(size) for size in shape)
    raise MemspanError(
        f"the memory's {name} is {form(field)} on {field.device}, not {named(dtype)} [{listed}] on "
        f"{device or 'cpu'}: use a memory of this model, of this size"
    )


def suits(x: Tensor, weight: Tensor) -> bool:
    """Check that a module with this weight accepts the type of ``x``: its own or, under autocast or
    with quantised weights, any floating-point type but float64."""
    return x.dtype == weight.dtype or (
        x.is_floating_point()
        and x.dtype != torch.float64
        and (not weight.is_floating_point() or torch.is_autocast_enabled(x.device.type))
    )


def row_mask(mask: Tensor | list[bool], count: int, device: torch.device | str) -> Tensor:
    """``mask`` as bool ``[B]`` on the device; refused if it is not one bool per row."""
    wanted = f"reset needs one bool per row, [{count}]"
    found = per_row(mask, torch.bool, wanted, device)
    if found.shape != (count,):
        raise MemspanError(f"{wanted}, not {list(found.shape)}")
    return found


def per_row(values: object, dtype: torch.dtype, wanted: str, device: torch.device | str) -> Tensor:
    """``values`` as a tensor ``[N]`` of that type on the device; an error begins with ``wanted``.
    Integers may have any type of integers."""
    try:
        found = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        raise MemspanError(f"{wanted}, not {values!r}") from None
    # An empty list does not have a type.
    if not found.numel() or (dtype == torch.int64 and _has_integers(found)):
        found = found.to(dtype)
    has_values = found.layout == torch.strided and (
        not found.is_meta or torch.device(device).type == "meta"
    )
    if found.dtype != dtype or found.dim() != 1 or not has_values:
        raise MemspanError(f"{wanted}, not {form(found)}")
    return to_device(found, device)


def _has_integers(tensor: Tensor) -> bool:
    kind = tensor.dtype
    return not (
        kind.is_floating_point or kind.is_complex or kind == torch.bool or tensor.is_quantized
    )


def form(tensor: Tensor) -> str:
    """Type and size for a message, and why its values cannot be read, if so."""
    kept = "meta " if tensor.is_meta else "" if tensor.layout == torch.strided else "sparse "
    return f"{kept}{named(tensor.dtype)} {list(tensor.shape)}"


def named(dtype: torch.dtype) -> str:
    """The type's name without its module, as in ``float32``."""
    return str(dtype).removeprefix("torch.")


def to_device(
    tensor: Tensor, device: torch.device | str, dtype: torch.dtype | None = None
) -> Tensor:
    """``tensor`` on the device. A copy from the CPU to CUDA does not wait."""
    device = torch.device(device)
    if tensor.device == device and dtype in (None, tensor.dtype):
        return tensor
    # CUDA has read pageable memory when the call returns; other devices may read it later.
    at_once = tensor.device.type == "cpu" and device.type == "cuda"
    return tensor.to(device, dtype, non_blocking=at_once)
