"""Run models of transformers with gated-delta layers on our operations on a CPU.

Layers of Qwen3-Next, Qwen3.5 and OLMo Hybrid call four functions by names of their module: two for the
gated delta rule, two for the convolution before it. These are kernels of fla and causal-conv1d, which
need a GPU, if installed, else plain PyTorch. Here a layer's forward pass is the same code with other
functions under these names. Everything else stays theirs: hooks, adapters and caches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache, update_wrapper, wraps
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.utils import is_torchdynamo_exporting

from memspan.errors import MemspanError
from memspan.models.gated_delta_net.layer import unit
from memspan.ops.convolution import short_convolution
from memspan.ops.fast_weights.rules import delta_rule

Function = Callable[..., Any]


class Acceleration:
    """What :func:`accelerate` did to a model; :meth:`remove` or the end of a ``with`` undoes it."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._layers = list(layers)

    def __enter__(self) -> Acceleration:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Give the layers their own functions back, but for those whose forward pass was replaced
        since. A second call does nothing."""
        for layer in self._layers:
            if not _is_replaced(layer):
                vars(layer).pop("forward", None)


def accelerate(model: nn.Module) -> Acceleration:
    """Put our operations into the gated-delta layers of a model of transformers on a CPU.

    Logits and gradients stay what they were, to rounding; gradients of gradients are refused. State
    dicts, hooks, adapters and caches are not touched. Accelerating a model, or a copy of one, again
    changes nothing.

    Args:
        model: with layers of Qwen3-Next, Qwen3.5 or OLMo Hybrid, wrapped by PEFT or not.

    Returns:
        A handle; ``handle.remove()``, or leaving a ``with`` block, undoes it.

    Raises:
        MemspanError: there is no such layer, or one is not on a CPU or differs from those known here.
            Then nothing is changed.
    """
    layers = {
        name: module
        for name, module in model.named_modules()
        if any(base.__name__.endswith("GatedDeltaNet") for base in type(module).__mro__)
    }
    if not layers:
        raise MemspanError(
            f"{type(model).__name__} has no gated-delta layers, as Qwen3-Next, Qwen3.5 and OLMo Hybrid "
            "have: there is nothing to accelerate"
        )
    for name, layer in layers.items():
        _refuse_unknown(f"{name} ({type(layer).__name__})", layer)
    for layer in layers.values():
        layer.forward = MethodType(_accelerated(type(layer).forward), layer)
    return Acceleration(layers.values())


# ----- Layers


def _refuse_unknown(what: str, layer: nn.Module) -> None:
    devices = {p.device.type for p in layer.parameters()} - {"cpu"}
    if devices:
        raise MemspanError(
            f"{what} is on {devices.pop()}, and accelerate() serves CPUs: call it after model.to('cpu')"
        )
    if _is_replaced(layer):
        raise MemspanError(
            f"the forward pass of {what} has been replaced, perhaps by hooks of the library "
            "accelerate: undo that first"
        )
    forward = inspect.unwrap(type(layer).forward)
    for name in _OURS:
        called = name in forward.__code__.co_names
        if not called or not _is_known(name, forward.__globals__[name]):
            raise MemspanError(
                f"{what} does not call {name} as it is known here: accelerate() needs layers of "
                "transformers 5.16 or newer, and the forward pass that they have there"
            )


def _is_replaced(layer: nn.Module) -> bool:
    own, plain = vars(layer).get("forward"), type(layer).forward
    # A layer pickled while accelerated has its class's forward pass as an instance attribute.
    return own is not None and getattr(own, "__func__", None) not in (plain, _accelerated(plain))


@cache
def _accelerated(forward: Function) -> Function:
    """The forward pass of a class of layers with our functions."""
    names = inspect.unwrap(forward).__globals__
    return _with_names(forward, {name: _instead(ours, names[name]) for name, ours in _OURS.items()})


def _with_names(function: Any, names: Mapping[str, Function]) -> Function:
    """The same code with other global ``names``; in a decorated function, in the inner one."""
    inner = getattr(function, "__wrapped__", None)
    cells = function.__closure__
    if inner is None:
        found = function.__globals__ | names
        # torch.compile would look names up in the module of this name.
        del found["__name__"]
    else:
        found = function.__globals__
        cells = tuple(
            CellType(_with_names(inner, names)) if cell.cell_contents is inner else cell
            for cell in cells
        )
    copy = FunctionType(function.__code__, found, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    return update_wrapper(copy, function)


# ----- Ours, with the arguments and results of theirs


def _gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    # In float32 whatever their types, like theirs.
    q, k, v, decay, strength = (x.transpose(1, 2).float() for x in (query, key, value, g, beta))
    if initial_state is None:
        before = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1])
    else:
        before = initial_state.float()
    with torch.autocast("cpu", enabled=False):
        if use_qk_l2norm_in_kernel:
            q, k = unit(q), unit(k)
        q = q * k.shape[-1] ** -0.5
        # A cache's own state, into which the layer copies what it gets: a token is read in place.
        in_place = before is initial_state and q.shape[2] == 1 and not torch.is_grad_enabled()
        out = before if in_place else None
        y, after = delta_rule(q, k, v, strength, before, log_decay=decay, out=out)
    return y.transpose(1, 2).to(query.dtype), after if output_final_state else None


def _convolution(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    x, weights = _at_least_float32(hidden_states.transpose(1, 2), weight)
    y, _ = short_convolution(x, weights, x.new_zeros(len(x), weight.shape[1] - 1, x.shape[2]))
    return _finished(y, bias, activation).to(hidden_states.dtype)


def _convolution_from_state(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    x, weights = _at_least_float32(torch.cat([conv_state, hidden_states], -1), weight)
    conv_state.copy_(x[..., -conv_state.shape[-1] :])
    width = weight.shape[1]
    windows = x[..., 1 - width - hidden_states.shape[-1] :].unfold(-1, width, 1)
    y = torch.linalg.vecdot(windows, weights[:, None]).transpose(1, 2)
    return _finished(y, bias, activation).to(hidden_states.dtype)


def _at_least_float32(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return x.to(dtype), weight.to(dtype)


def _finished(y: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Add the bias, apply the activation, and turn channels last into channels first."""
    y = y if bias is None else y + bias
    return (y if activation is None else ACT2FN[activation](y)).transpose(1, 2)


_OURS: dict[str, Function] = {
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "torch_recurrent_gated_delta_rule": _gated_delta_rule,
    "causal_conv1d_fn": _convolution,
    "causal_conv1d_update": _convolution_from_state,
}
"""Our functions by their names."""


def _instead(ours: Function, theirs: Function) -> Function:
    """``ours``, but ``theirs`` on other devices, for packed documents and in exports."""

    @wraps(theirs)
    def chosen(x: Tensor, *given: Any, **options: Any) -> Any:
        packed = any(options.get(name) is not None for name in ("cu_seqlens", "seq_idx"))
        serves = x.device.type == "cpu" and not packed and not is_torchdynamo_exporting()
        return (ours if serves else theirs)(x, *given, **options)

    return chosen


@cache
@torch.no_grad()
def _is_known(name: str, theirs: Function) -> bool:
    """Whether transformers' own function, not fla's in its place, computes what ours does."""
    plain, ours = inspect.unwrap(theirs), _OURS[name]
    # Ours would not see any other arguments.
    arguments, own = ({*inspect.signature(each).parameters} for each in (plain, ours))
    if arguments - {"chunk_size"} != own:
        return False
    if not _agree(plain, ours, _example(name, key_heads=4)):
        return False
    # Some versions have layers repeat their keys first.
    with suppress(RuntimeError):
        return _agree(plain, ours, _example(name, key_heads=2))
    return True


def _agree(theirs: Function, ours: Function, given: Mapping[str, Any]) -> bool:
    sides = []
    for function in (theirs, ours):
        own = {k: x.clone() if isinstance(x, Tensor) else x for k, x in given.items()}
        found = function(**own)
        sides.append([*(found if isinstance(found, tuple) else [found]), own.get("conv_state")])
    return all(
        a is b or torch.allclose(a, b, rtol=2e-5, atol=2e-5) for a, b in zip(*sides, strict=True)
    )


def _example(name: str, key_heads: int) -> dict[str, Any]:
    """Arguments, of two rows; for a rule over two of their chunks and from a state."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=generator, dtype=torch.float32, device="cpu")

    if "gated_delta_rule" in name:
        given = {"query": random(70, key_heads, 8), "key": random(70, key_heads, 8)}
        given |= {"value": random(70, 4, 6), "beta": random(70, 4).sigmoid()}
        given |= {"g": -random(70, 4).exp(), "initial_state": random(4, 8, 6)}
        return given | {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    single = name == "causal_conv1d_update"
    state = {"conv_state": random(5, 4)} if single else {}
    given = {"hidden_states": random(5, 1 if single else 9), "weight": random(5, 4)[0]}
    return given | state | {"activation": "silu"}
