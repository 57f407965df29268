"""Causal language models of the library transformers, which carry their state in caches."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from statelaws.case import device_of
from statelaws.protocol import (
    MADE,
    Claims,
    Inputs,
    NotOfferedError,
    Padding,
    RefusedError,
    tensors_of,
)
from statelaws.recurrent import copied, mapped

CACHES = ("cache", "past_key_values", "cache_params", "state", "mems", "past_buckets_states")
"""Names of caches, in models' outputs and arguments: the first is transformers' since 5.24."""
LENGTHS = (
    "sliding_window", "attention_window_size", "window_size", "attention_chunk_size", "chunk_size",
    "mamba_chunk_size", "block_size", "conv_kernel", "conv_L_cache", "mamba_d_conv", "conv1d_width",
    "linear_conv_kernel_dim", "short_conv_kernel_size", "ple_conv_kernel_size",
)  # fmt: skip
"""Options of configs for lengths in tokens."""
PROMISED: frozenset[Padding] = frozenset({"right-last", "left"})
"""Padding that a mask leaves out, but not from states after padding on the right: generate warns."""


@dataclass
class Cached:
    """A cache, and what it has read."""

    rows: int
    length: int = 0
    """Tokens so far, padding included."""
    cache: Any = None
    """None: nothing was read."""
    mask: Tensor | None = None
    """int64 ``[B, length]``, 0 for padding (None: no padding so far)."""


class Causal:
    """A causal language model as in transformers, read as its ``generate`` reads: the mask covers all
    tokens so far, and positions count those that are not padding. Outputs are logits.

    Args:
        module: it takes ``input_ids``, returns logits and a cache by name, and takes the cache again.
        lengths: internal lengths that its config does not name.
        padding: what its documentation promises (None: what :data:`PROMISED` says).
        made: Python that makes ``module``, for scripts.

    Raises:
        RefusedError: it has no logits or no cache, or cannot be read here.
    """

    def __init__(
        self,
        module: nn.Module,
        lengths: Mapping[str, int] | None = None,
        padding: frozenset[Padding] | None = None,
        made: str = MADE,
    ) -> None:
        self.module, self._made = module, made
        config: Any = getattr(module, "config", None)
        if hasattr(config, "get_text_config"):
            config = config.get_text_config(decoder=True)
        size = getattr(config, "vocab_size", None)
        if not isinstance(size, int):
            raise RefusedError(f"{type(module).__name__} has no config.vocab_size")
        # Wrappers, as PEFT's, pass on what they do not name.
        own: Any = module
        if hasattr(module, "get_base_model"):
            own = own.get_base_model()
        self._accepted = inspect.signature(own.forward).parameters
        takes = [name for name in CACHES if name in self._accepted]
        if not takes:
            raise RefusedError(
                f"{type(own).__name__}.forward takes no cache by a name known here "
                f"({', '.join(CACHES)}): it could not be given its state"
            )
        self._takes = self._returns = takes[0]
        self.inputs = Inputs(vocab_size=size)
        named = {name: getattr(config, name, None) for name in LENGTHS}
        found = {name: n for name, n in named.items() if isinstance(n, int) and n > 1}
        self._masks_past = True
        self._first: Callable[[int], Any] = lambda rows: None
        self._first_source, self._imports = "None", ""
        try:
            bounded = self._try()
        except RefusedError:
            raise
        except Exception as error:
            raise RefusedError(f"{type(error).__name__}: {error}") from error
        self.claims = Claims(
            consumes_state=True,
            bounded=bounded,
            padding=PROMISED if padding is None else padding,
            lengths={**found, **(lengths or {})},
        )

    @torch.no_grad()
    def _try(self) -> bool:
        """Read a few tokens, to see what the model takes, and whether its cache will stop growing."""
        # Two that differ, if there are two: a mean over equal ones does not depend on their number.
        size = self.inputs.vocab_size or 1
        tokens = torch.arange(2, device=device_of(self))[None] % size
        try:
            _, first = self.read(tokens, self.start(1))
        except RefusedError:
            # Some do not return a cache, and fill the one that generate makes.
            if not type(self.module).__module__.startswith("transformers."):
                raise
            self._make_first()
            _, first = self.read(tokens, self.start(1))
        n_numbers, problem = _size(first), None
        # Models without attention take a mask of the new inputs only; earlier releases of some continue
        # with single tokens only.
        for length, masks_past in ((2, True), (2, False), (1, True), (1, False)):
            self._masks_past = masks_past
            try:
                _, first = self.read(tokens, self.start(1))
                continued, state = self.read(tokens[:, :length], first)
                break
            except Exception as error:
                problem = problem or error
        else:
            assert problem
            raise problem
        fresh, _ = self.read(tokens[:, :length], self.start(1))
        if torch.equal(continued, fresh):
            raise RefusedError(
                f"the cache given to {type(self.module).__name__} as {self._takes} had no effect: its "
                "logits are those after an empty one"
            )
        layers = getattr(state.cache, "layers", None)
        if layers is None:
            return _size(state) == n_numbers
        return all(getattr(layer, "is_sliding", not hasattr(layer, "keys")) for layer in layers)

    def _make_first(self) -> None:
        """Begin with the cache that generate makes: in earlier releases some models had their own."""
        from transformers import DynamicCache

        module: Any = self.module
        home = sys.modules[type(module).__module__]
        own = [
            kind
            for name, kind in vars(home).items()
            if name.endswith("DynamicCache") and kind.__module__ == home.__name__
        ]
        if own:
            self._first = lambda rows: own[0](module.config, rows, module.dtype, module.device)
            arguments = "module.config, batch_size, module.dtype, module.device"
        else:
            self._first = lambda rows: DynamicCache(config=module.config)
            arguments = "config=module.config"
        name = own[0].__name__ if own else "DynamicCache"
        self._first_source = f"{name}({arguments})"
        self._imports = f"from {home.__name__ if own else 'transformers'} import {name}\n"

    @property
    def state_arguments(self) -> tuple[str, ...]:
        """The name by which the module takes its cache."""
        return (self._takes,)

    def start(self, batch_size: int) -> Cached:
        return Cached(batch_size, cache=self._first(batch_size))

    def read(self, inputs: Tensor, state: Cached) -> tuple[Tensor, Cached]:
        return self._read(inputs, state, None)

    def read_padded(
        self, inputs: Tensor, state: Cached, lengths: Tensor, side: Literal["right", "left"]
    ) -> tuple[Tensor, Cached]:
        if "attention_mask" not in self._accepted:
            raise NotOfferedError("it does not take an attention_mask")
        places = torch.arange(inputs.shape[1], device=inputs.device)
        if side == "left":
            places = places.flip(0)
        return self._read(inputs, state, (places < lengths[:, None]).long())

    def _read(self, inputs: Tensor, state: Cached, mask: Tensor | None) -> tuple[Tensor, Cached]:
        length = inputs.shape[1]
        if not length:
            raise NotOfferedError("generate never reads no tokens")
        if mask is not None or state.mask is not None:
            before = inputs.new_ones(state.rows, state.length) if state.mask is None else state.mask
            mask = inputs.new_ones(inputs.shape) if mask is None else mask
            mask = torch.cat([before, mask], 1)
        whole = inputs.new_ones(len(inputs), state.length + length) if mask is None else mask
        given = {
            "use_cache": True,
            "return_dict": True,
            "attention_mask": whole if self._masks_past else whole[:, state.length :],
            "position_ids": (whole.cumsum(1) - 1).masked_fill(whole == 0, 0)[:, state.length :],
        }
        given = {name: value for name, value in given.items() if name in self._accepted}
        if state.cache is not None:
            given[self._takes] = state.cache
        output = self.module(input_ids=inputs, **given)
        # Outputs of transformers answer to earlier names, too, but warn of them.
        parts = {**output} if isinstance(output, Mapping) else {}
        if parts.get("logits") is None:
            raise RefusedError(
                "it does not return logits: give a model with a language model's head"
            )
        returned = next((name for name in CACHES if parts.get(name) is not None), None)
        if returned is None and state.cache is None:
            raise RefusedError(f"it returns no cache ({', '.join(CACHES)}): it carries no state")
        # What is not returned was changed in place.
        cache = state.cache if returned is None else parts[returned]
        self._returns = returned or self._returns
        if returned in self._accepted:
            self._takes = self._returns
        return parts["logits"], Cached(state.rows, state.length + length, cache, mask)

    def select(self, state: Cached, rows: Tensor) -> Cached:
        """Select rows with the cache's ``reorder_cache`` or ``batch_select_indices``."""
        cache = state.cache
        if isinstance(cache, tuple | list | dict):
            cache = mapped(lambda part: part.index_select(0, rows), cache)
        elif cache is not None:
            names = ("reorder_cache", "batch_select_indices")
            method = next((getattr(cache, name) for name in names if hasattr(cache, name)), None)
            if method is None:
                raise NotOfferedError(
                    f"its {type(cache).__name__} has neither {' nor '.join(names)}"
                )
            method(rows)
        mask = None if state.mask is None else state.mask.index_select(0, rows)
        return Cached(len(rows), state.length, cache, mask)

    def truncate(self, state: Cached, n: int) -> Cached:
        """Roll back with the cache's ``crop``."""
        if not hasattr(state.cache, "crop"):
            raise NotOfferedError(f"its {type(state.cache).__name__} has no crop")
        state.cache.crop(-n)
        mask = None if state.mask is None else state.mask[:, : state.length - n]
        return Cached(state.rows, state.length - n, state.cache, mask)

    def copy(self, state: Cached) -> Cached:
        return copied(state)

    def source(self) -> str:
        takes = [name for name in ("use_cache", "return_dict") if name in self._accepted]
        given = [f"{name}=True" for name in takes]
        if "attention_mask" in self._accepted:
            given.append(f"attention_mask=mask{'' if self._masks_past else '[:, -n:]'}")
        if "position_ids" in self._accepted:
            given.append("position_ids=(mask.cumsum(1) - 1).masked_fill(mask == 0, 0)[:, -n:]")
        returned = "cache" if self._imports else f"output.{self._returns}"
        return f"""\
import copy as copying
{self._imports}{self._made}


def start(batch_size):
    return {self._first_source}, torch.ones(batch_size, 0, dtype=torch.int64)


def read(inputs, state, new=None):
    cache, mask = state
    n = inputs.shape[1]
    mask = torch.cat([mask, torch.ones_like(inputs) if new is None else new], 1)
    output = module(input_ids=inputs, {self._takes}=cache, {", ".join(given)})
    return output.logits, ({returned}, mask)


def read_padded(inputs, state, lengths, side):
    places = torch.arange(inputs.shape[1])
    places = places.flip(0) if side == "left" else places
    return read(inputs, state, (places < lengths[:, None]).long())


def select(state, rows):
    state[0].reorder_cache(rows)
    return state[0], state[1][rows]


def truncate(state, n):
    state[0].crop(-n)
    return state[0], state[1][:, :-n]


def copy(state):
    return copying.deepcopy(state)
"""


def _size(state: Cached) -> int:
    return sum(tensor.numel() for tensor in tensors_of(state))
