"""Memories, outputs and options as trees of tensors, for ``torch.export``, ``torch.func`` and
``torch.utils._pytree.tree_map``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any, TypeVar

from torch.utils import _pytree as pytree

T = TypeVar("T", bound=type)


def tree(kind: T) -> T:
    """Register a dataclass: its fields are the leaves, or trees themselves. A decorator."""

    def flatten(value: Any) -> tuple[list[Any], tuple[str, ...]]:
        # "compressed_length" before "compressed": torch.export puts the leaves' names in its checks by
        # replacing one after the other, wherever they occur.
        names = tuple(sorted((field.name for field in fields(value)), reverse=True))
        return [getattr(value, name) for name in names], names

    def with_keys(value: Any) -> tuple[list[tuple[pytree.KeyEntry, Any]], tuple[str, ...]]:
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
    return kind


def constant(kind: type) -> None:
    """Register a class of options, which are no tensors: a tree without leaves."""
    if kind not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(
            kind, _nothing_of, lambda _, options: options, flatten_with_keys_fn=_nothing_of
        )


def _nothing_of(options: Any) -> tuple[list[Any], Any]:
    return [], options
