"""Causal language models of the library transformers, which carry their state in caches."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from statelaws.errors import NotOfferedError, RefusedError
from statelaws.inputs import Inputs
from statelaws.protocol import MADE, Claims, Padding
from statelaws.reading import device_of
from statelaws.script import Functions, by_name, source_of
from statelaws.states import copied, tensors_of

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


State = tuple[Any, int, Tensor | None]
"""A cache (None: nothing was read), the number of tokens that it has read, padding included, and a mask
``[B, tokens]``, int64, 0 for padding (None: no padding so far)."""


@dataclass(frozen=True)
class Calls:
    """The arguments and outputs of a model that concern its cache."""

    takes: str
    """The argument by which it takes its cache."""
    parameters: Collection[str]
    """Names of all its arguments."""
    returns: str | None = None
    """The name by which its output has the cache (None: it is changed in place)."""
    masks: Literal["all", "new", "none"] = "all"
    """The mask covers all tokens so far; or the call's alone, for models without attention; or there is
    none unless a token is padding, where with neither of them a cache is continued right."""
    cache_type: Any = None
    """The type of an empty cache (None: the model makes its own)."""
    of_model: bool = False
    """True if the cache is of the model's own type, as in earlier releases; made from batch size, type
    and device."""

    @property
    def accepts(self) -> tuple[str, ...]:
        """The arguments that it is given besides ``input_ids``."""
        options = ("use_cache", "return_dict", "attention_mask", "position_ids", "cache_position")
        return tuple(name for name in (self.takes, *options) if name in self.parameters)


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
        self.module = module
        self._made = made
        config: Any = getattr(module, "config", None)
        if hasattr(config, "get_text_config"):
            config = config.get_text_config(decoder=True)
        size = getattr(config, "vocab_size", None)
        if not isinstance(size, int):
            raise RefusedError(f"{type(module).__name__} has no config.vocab_size")
        self.inputs = Inputs(vocab_size=size)
        named = {name: getattr(config, name, None) for name in LENGTHS}
        found = {name: n for name, n in named.items() if isinstance(n, int) and n > 1}
        try:
            self._calls, bounded = self._probed(_calls_of(module))
        except RefusedError:
            raise
        except Exception as error:
            raise RefusedError(f"{type(error).__name__}: {error}") from error
        self._functions = _functions(module, self._calls)
        self.claims = Claims(
            consumes_state=True,
            bounded=bounded,
            padding=PROMISED if padding is None else padding,
            lengths={**found, **(lengths or {})},
        )

    @torch.no_grad()
    def _probed(self, calls: Calls) -> tuple[Calls, bool]:
        """Read a few tokens, to learn the arguments of the model and if its cache will stop growing."""
        # Two that differ, if there are two: a mean over equal ones does not depend on their number.
        size = self.inputs.vocab_size or 1
        tokens = torch.arange(2, device=device_of(self))[None] % size
        # Some leave the mask out for one row.
        tokens = torch.cat([tokens, tokens.flip(1)])
        try:
            calls = _with_names(self.module, calls, tokens)
        except RefusedError:
            # Some do not return a cache, and fill the one that generate makes.
            if not type(self.module).__module__.startswith("transformers."):
                raise
            calls = _with_names(self.module, _with_first_cache(self.module, calls), tokens)
        calls, length = self._masks(calls, tokens)
        functions = _functions(self.module, calls)
        _, first = functions["read"](tokens, functions["start"](len(tokens)))
        n_numbers = _size(first)
        continued, state = functions["read"](tokens[:, :length], first)
        fresh, _ = functions["read"](tokens[:, :length], functions["start"](len(tokens)))
        if torch.equal(continued, fresh):
            raise RefusedError(
                f"the cache given to {type(self.module).__name__} as {calls.takes} had no effect: its "
                "logits are those after an empty one"
            )
        layers = getattr(state[0], "layers", None)
        if layers is None:
            return calls, _size(state) == n_numbers
        return calls, all(
            getattr(layer, "is_sliding", not hasattr(layer, "keys")) for layer in layers
        )

    def _masks(self, calls: Calls, tokens: Tensor) -> tuple[Calls, int]:
        """Find the mask with which a cache is continued, and by how many tokens.

        Models without attention take a mask of the new tokens only; earlier releases of some continue
        with single tokens only. In earlier releases of models with some attention a mask of all tokens
        fails, and one of the new tokens hides those before from attention, without an error.
        """

        def continued(calls: Calls, length: int) -> Tensor:
            functions = _functions(self.module, calls)
            _, first = functions["read"](tokens, functions["start"](len(tokens)))
            output, state = functions["read"](tokens[:, :length], first)
            if output.shape[1] != length:
                # By a mask that was broadcast.
                raise ValueError(f"{output.shape[1]} outputs for {length} tokens")
            if calls.masks == "new" and _holds_keys(state[0]):
                unmasked = continued(replace(calls, masks="none"), length)
                if not torch.allclose(output, unmasked):
                    raise ValueError("a mask of the new tokens hides those before")
            return output

        problem = None
        kinds: tuple[Literal["all", "new", "none"], ...] = ("all", "new", "none")
        for length in (2, 1):
            for masks in kinds:
                tried = replace(calls, masks=masks)
                try:
                    continued(tried, length)
                    return tried, length
                except Exception as error:
                    problem = problem or error
        assert problem
        raise problem

    @property
    def state_arguments(self) -> tuple[str, ...]:
        """The name by which the module takes its cache."""
        return (self._calls.takes,)

    def start(self, batch_size: int) -> State:
        return self._functions["start"](batch_size)

    def read(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        if not inputs.shape[1]:
            raise NotOfferedError("generate never reads no tokens")
        return self._functions["read"](inputs, state)

    def read_padded(
        self, inputs: Tensor, state: State, lengths: Tensor, side: Literal["right", "left"]
    ) -> tuple[Tensor, State]:
        if "attention_mask" not in self._calls.accepts:
            raise NotOfferedError("it does not take an attention_mask")
        if not inputs.shape[1]:
            raise NotOfferedError("generate never reads no tokens")
        return self._functions["read_padded"](inputs, state, lengths, side)

    def select(self, state: State, rows: Tensor) -> State:
        """Select rows with the cache's ``reorder_cache`` or ``batch_select_indices``."""
        names = ("reorder_cache", "batch_select_indices")
        known = isinstance(state[0], tuple | list | dict | None)
        if not known and not any(hasattr(state[0], name) for name in names):
            raise NotOfferedError(
                f"its {type(state[0]).__name__} has neither {' nor '.join(names)}"
            )
        return self._functions["select"](state, rows)

    def truncate(self, state: State, n: int) -> State:
        """Roll back with the cache's ``crop``."""
        if not hasattr(state[0], "crop"):
            raise NotOfferedError(f"its {type(state[0]).__name__} has no crop")
        return self._functions["truncate"](state, n)

    def copy(self, state: State) -> State:
        """A deep copy, without gradients."""
        # Tensors with gradients cannot be copied deeply as they are.
        return copied(state) if torch.is_grad_enabled() else self._functions["copy"](state)

    def source(self, names: Collection[str]) -> str:
        return "\n\n".join([self._made, source_of(self._functions, names)])


def _holds_keys(cache: Any) -> bool:
    """True if a cache holds keys of attention."""
    return hasattr(cache, "key_cache") or any(
        hasattr(layer, "keys") for layer in getattr(cache, "layers", ())
    )


def _functions(module: Any, calls: Calls) -> Functions:
    """The functions of the protocol; scripts are made from them as well."""
    takes = calls.takes
    accepts = calls.accepts
    returns = calls.returns
    masks = calls.masks
    cache_type = calls.cache_type
    of_model = calls.of_model

    def start(batch_size: int) -> State:
        cache = None
        if of_model:
            cache = cache_type(module.config, batch_size, module.dtype, module.device)
        elif cache_type is not None:
            cache = cache_type(config=module.config)
        return cache, 0, None

    def read(inputs: Tensor, state: State, real: Tensor | None = None) -> tuple[Tensor, State]:
        cache, length, mask = state
        if real is not None or mask is not None:
            before = inputs.new_ones(len(inputs), length) if mask is None else mask
            mask = torch.cat([before, torch.ones_like(inputs) if real is None else real], 1)
        after = length + inputs.shape[1]
        seen = inputs.new_ones(len(inputs), after) if mask is None else mask
        options = {
            takes: cache,
            "use_cache": True,
            "return_dict": True,
            "attention_mask": {"all": seen, "new": seen[:, length:], "none": mask}[masks],
            "position_ids": (seen.cumsum(1) - 1).masked_fill(seen == 0, 0)[:, length:],
            "cache_position": torch.arange(length, after, device=inputs.device),
        }
        options = {name: options[name] for name in accepts if options[name] is not None}
        output = module(input_ids=inputs, **options)
        return output["logits"], (output[returns] if returns else cache, after, mask)

    def read_padded(
        inputs: Tensor, state: State, lengths: Tensor, side: str
    ) -> tuple[Tensor, State]:
        places = torch.arange(inputs.shape[1], device=inputs.device)
        places = places.flip(0) if side == "left" else places
        return read(inputs, state, (places < lengths[:, None]).long())

    def select(state: State, rows: Tensor) -> State:
        cache, length, mask = state
        if hasattr(cache, "reorder_cache"):
            cache.reorder_cache(rows)
        elif hasattr(cache, "batch_select_indices"):
            cache.batch_select_indices(rows)
        else:
            cache = rows_of(cache, rows)
        return cache, length, None if mask is None else mask[rows]

    def truncate(state: State, n: int) -> State:
        cache, length, mask = state
        cache.crop(-n)
        return cache, length - n, None if mask is None else mask[:, : length - n]

    def copy(state: State) -> State:
        return deepcopy(state)

    return by_name(start, read, read_padded, select, truncate, copy)


def rows_of(cache: Any, rows: Tensor) -> Any:
    """The rows of all tensors within tuples, lists and dictionaries."""
    if isinstance(cache, dict):
        return {name: rows_of(part, rows) for name, part in cache.items()}
    if isinstance(cache, tuple | list):
        return type(cache)(rows_of(part, rows) for part in cache)
    return cache if cache is None else cache.index_select(0, rows)


def _calls_of(module: nn.Module) -> Calls:
    """Find the cache among the parameters of a model's ``forward``."""
    # Wrappers, as PEFT's, pass on what they do not name.
    own: Any = module
    if hasattr(module, "get_base_model"):
        own = own.get_base_model()
    parameters = inspect.signature(own.forward).parameters
    takes = next((name for name in CACHES if name in parameters), None)
    if takes is None:
        raise RefusedError(
            f"{type(own).__name__}.forward takes no cache by a name known here "
            f"({', '.join(CACHES)}): it could not be given its state"
        )
    return Calls(takes, parameters)


def _with_names(module: nn.Module, calls: Calls, tokens: Tensor) -> Calls:
    """``calls`` with the names by which an output has its cache and the next call takes it."""
    outputs = []

    def recorded(**options: Any) -> dict[str, None]:
        outputs.append(module(**options))
        return {"logits": None}

    state = _functions(module, calls)["start"](len(tokens))
    _functions(recorded, calls)["read"](tokens, state)
    # Outputs of transformers also answer to earlier names, but warn about them.
    parts = {**outputs[0]} if isinstance(outputs[0], Mapping) else {}
    if parts.get("logits") is None:
        raise RefusedError("it does not return logits: give a model with a language model's head")
    returns = next((name for name in CACHES if parts.get(name) is not None), None)
    if returns is None and calls.cache_type is None:
        raise RefusedError(f"it returns no cache ({', '.join(CACHES)}): it carries no state")
    if returns is not None and returns in calls.parameters:
        calls = replace(calls, takes=returns)
    return replace(calls, returns=returns)


def _with_first_cache(module: Any, calls: Calls) -> Calls:
    """Begin with the cache that generate makes: in earlier releases some models had their own."""
    from transformers import DynamicCache

    home = sys.modules[type(module).__module__]
    own = [
        kind
        for name, kind in vars(home).items()
        if name.endswith("DynamicCache") and kind.__module__ == home.__name__
    ]
    return replace(calls, cache_type=own[0] if own else DynamicCache, of_model=bool(own))


def _size(state: State) -> int:
    return sum(tensor.numel() for tensor in tensors_of(state))
