"""Record layers of flash-linear-attention: their own code, over its plain recurrences.

The package itself need not be installed, which would bring Triton: a layer's file is run from the
unpacked wheels, with float64 in place of float32. What Triton computes there is replaced: rules by the
package's plain recurrences, and convolution, norms and token shift by a few lines here. It imports
einops.

    pip download --no-deps fla-core==0.6.0 flash-linear-attention==0.6.0
    python -m zipfile -e fla_core-*.whl fla && python -m zipfile -e flash_linear_attention-*.whl fla
    python tests/recorded/from_fla_layers.py fla tests/recorded/fla_layers
"""

from __future__ import annotations

import ast
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from from_fla import VERSION, function, in_float64
from safetensors.torch import save_file
from torch import Tensor, nn

B = 2
SEGMENTS = (9, 8)
D = 12
HEADS = 2


class ShortConvolution(nn.Module):
    """A causal convolution, SiLU after it, with the last inputs as its state."""

    def __init__(self, hidden_size: int, kernel_size: int, **_: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, 1, kernel_size))

    def forward(self, x: Tensor, cache: Tensor | None, **_: object) -> tuple[Tensor, Tensor]:
        width = self.weight.shape[-1]
        before = x.new_zeros(x.shape[0], width - 1, x.shape[2]) if cache is None else cache
        x = torch.cat([before, x], 1)
        y = F.conv1d(x.mT, self.weight, groups=x.shape[2]).mT
        return F.silu(y), x[:, x.shape[1] - width + 1 :]


class Norm(nn.Module):
    """RMSNorm, times a gate if there is one."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, activation: str = "swish", **_: object):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.eps = eps
        self.gate: Any = torch.sigmoid if activation == "sigmoid" else F.silu

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        y = F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        return y if gate is None else y * self.gate(gate)


class NoRotation(nn.Module):
    """In place of RetNet's rotation of queries and keys, which our setting of GLA does not have."""

    def __init__(self, dim: int) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, **_: object) -> tuple[Tensor, Tensor]:
        return q, k


class Cache(dict[str, Any]):
    """A layer's state between segments."""

    def get_seq_length(self, layer: int | None) -> int:
        """No place matters without a rotation."""
        return 0


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def rule(
    tree: Path, name: str, gate: Callable[..., Tensor] | None = None
) -> Callable[..., tuple[Tensor, Tensor]]:
    """A plain recurrence with the arguments of its kernels. ``gate``: makes KDA's decays."""
    recurrence = function(tree, name)

    def run(
        q: Tensor,
        k: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        **given: Any,
    ) -> tuple[Tensor, Tensor]:
        if use_qk_l2norm_in_kernel:
            q, k = unit(q), unit(k)
        if gate is not None:
            given["g"] = gate(given["g"], given.pop("A_log"), given.pop("dt_bias"))
            given["beta"] = given["beta"].sigmoid() * (1 + allow_neg_eigval)
        if name == "delta_product":
            given["scale"] = q.shape[-1] ** -0.5
        dropped = ("cu_seqlens", "state_v_first", "safe_gate", "lower_bound", "chunk_size")
        given = {n: x for n, x in given.items() if n not in dropped and not n.startswith("use_")}
        result: tuple[Tensor, Tensor] = recurrence(q=q, k=k, **given | {"output_final_state": True})
        return result

    return run


def rwkv7(tree: Path) -> Callable[..., tuple[Tensor, Tensor]]:
    """RWKV-7's rule by the recurrence of any diagonal plus low rank, which is heads first."""
    recurrence = function(tree, "dplr")

    def run(
        r: Tensor,
        w: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        initial_state: Tensor | None,
        **_: object,
    ) -> tuple[Tensor, Tensor]:
        q, k, v, a, b, w = (t.transpose(1, 2) for t in (r, k, v, a, b, w))
        # It divides queries by the root of their width.
        q = q * q.shape[-1] ** 0.5
        y, state = recurrence(q, k, v, a, b, w, initial_state=initial_state)
        return y.transpose(1, 2), state

    return run


def retention(tree: Path) -> Callable[..., tuple[Tensor, Tensor]]:
    """Retention with a state: its decays, as simple GLA."""
    recurrence = function(tree, "simple_gla")

    def run(q: Tensor, k: Tensor, v: Tensor, initial_state: Tensor | None, **_: object) -> Any:
        heads = torch.arange(q.shape[2], dtype=q.dtype)
        g = (1 - 2.0 ** (-5 - heads)).log().expand(q.shape[:3])
        return recurrence(q, k, v, g=g, initial_state=initial_state, output_final_state=True)

    return run


def token_shift(
    x: Tensor, cu_seqlens: None, output_cache: bool, cache: Tensor | None = None
) -> Any:
    """The difference to the token before, and the last token."""
    before = torch.zeros_like(x[:, :1]) if cache is None else cache
    return torch.cat([before, x[:, :-1]], 1) - x, x[:, -1:]


def picked(tree: Path, file: str, *names: str) -> dict[str, Any]:
    """Functions and classes of a file, without the rest of it."""
    module = ast.parse(in_float64((tree / "fla" / file).read_text()))
    module.body = [
        each
        for each in module.body
        if (isinstance(each, ast.FunctionDef | ast.ClassDef) and each.name in names)
        or (isinstance(each, ast.ImportFrom) and each.module == "__future__")
    ]
    scope: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "math": __import__("math")}
    exec(compile(module, file, "exec"), scope)
    return {name: scope[name] for name in names}


def stand_in(name: str, **members: Any) -> None:
    """A module that layers import from."""
    module = ModuleType(name)
    vars(module).update(members)
    sys.modules[name] = module


def stand_ins(tree: Path) -> None:
    """All that layers import from the package."""
    for package in ("fla", "fla.layers", "fla.models", "fla.ops", "fla.ops.rwkv7", "fla.ops.utils"):
        stand_in(package)
    stand_in(
        "fla.layers.utils",
        get_layer_cache=lambda layer, cache: cache or None,
        update_layer_cache=lambda layer, cache, **state: cache.update(state),
        unpad_hidden_states=lambda x, cu_seqlens, mask, length: (x, None, None),
        repad_hidden_states=lambda x, indices, rows, length: x,
    )
    stand_in(
        "fla.modules",
        ShortConvolution=ShortConvolution,
        FusedRMSNormGated=Norm,
        RMSNorm=Norm,
        GroupNorm=nn.GroupNorm,
    )
    stand_in("fla.modules.rotary", RotaryEmbedding=NoRotation)
    stand_in("fla.modules.activations", ACT2FN={"swish": F.silu})
    stand_in("fla.ops.utils.index", prepare_lens_from_mask=None)
    stand_in("fla.modules.l2norm", l2_norm=unit)
    stand_in("fla.modules.token_shift", token_shift=token_shift)
    gate = picked(tree, "ops/kda/gate.py", "naive_kda_gate")["naive_kda_gate"]

    def in_double(g: Tensor, rates: Tensor, biases: Tensor) -> Tensor:
        decays: Tensor = gate(g, rates, biases, torch.float64)
        return decays

    kda = rule(tree, "kda", in_double)
    stand_in("fla.ops.kda", chunk_kda=kda, fused_recurrent_kda=kda)
    gdn2 = rule(tree, "gdn2")
    stand_in("fla.ops.gdn2", chunk_gdn2=gdn2, fused_recurrent_gdn2=gdn2)
    product = rule(tree, "delta_product")
    stand_in("fla.ops.gated_delta_product", chunk_gated_delta_product=product)
    stand_in("fla.ops.gated_delta_rule", fused_recurrent_gated_delta_rule=None)
    gla = rule(tree, "gla")
    stand_in("fla.ops.gla", chunk_gla=None, fused_chunk_gla=None, fused_recurrent_gla=gla)
    retain = retention(tree)
    names = ("chunk", "fused_chunk", "fused_recurrent", "parallel")
    stand_in("fla.ops.retention", **{f"{name}_retention": retain for name in names})
    stand_in("fla.layers.rwkv6", **picked(tree, "layers/rwkv6.py", "LoRA"))
    rwkv = rwkv7(tree)
    vars(sys.modules["fla.ops.rwkv7"]).update(chunk_rwkv7=rwkv, fused_mul_recurrent_rwkv7=rwkv)
    stand_in(
        "fla.ops.rwkv7.fused_addcmul",
        fused_addcmul_rwkv7=lambda x, delta, *shares: [x + delta * share for share in shares],
    )
    update = picked(tree, "ops/rwkv7/fused_k_update.py", "k_update_ref")["k_update_ref"]
    stand_in("fla.ops.rwkv7.fused_k_update", fused_k_rwkv7=update)
    file = "ops/rwkv7/gate_output_correction.py"
    correct = picked(tree, file, "gate_output_correction_ref")["gate_output_correction_ref"]
    stand_in("fla.ops.rwkv7.gate_output_correction", gate_output_correction=correct)


SIZES = {"hidden_size": D, "num_heads": HEADS, "norm_eps": 1e-6}
LAYERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "kda": ("kda", "KimiDeltaAttention", {"head_dim": 6, "expand_v": 1.5}),
    "kda_negative": ("kda", "KimiDeltaAttention", {"head_dim": 6, "allow_neg_eigval": True}),
    "gdn2": ("gdn2", "GatedDeltaNet2", {"head_dim": 6, "expand_v": 1.5}),
    "delta_product": (
        "gated_deltaproduct",
        "GatedDeltaProduct",
        {"head_dim": 4, "expand_v": 1.5, "num_householder": 3},
    ),
    "delta_product_without_decay": (
        "gated_deltaproduct",
        "GatedDeltaProduct",
        {"head_dim": 4, "use_forget_gate": False, "allow_neg_eigval": False},
    ),
    "gla": ("gla", "GatedLinearAttention", {"gate_low_rank_dim": 5}),
    "retnet": ("multiscale_retention", "MultiScaleRetention", {"expand_v": 1.5}),
    "rwkv7": (
        "rwkv7",
        "RWKV7Attention",
        {
            "head_dim": None,
            "norm_eps": 1e-5,
            "decay_low_rank_dim": 5,
            "gate_low_rank_dim": 4,
            "a_low_rank_dim": 3,
            "v_low_rank_dim": 2,
            "layer_idx": 1,
            "num_hidden_layers": 2,
        },
    ),
}
"""By name: file and class, and options besides :data:`SIZES`."""


def layer_of(tree: Path, name: str) -> nn.Module:
    """The layer, with parameters that are float32 numbers in float64."""
    file, kind, options = LAYERS[name]
    source = in_float64((tree / f"fla/layers/{file}.py").read_text())
    scope: dict[str, Any] = {"__name__": file}
    exec(compile(source, file, "exec"), scope)
    layer: nn.Module = scope[kind](**SIZES | options).double()
    generator = torch.Generator().manual_seed(49)
    for parameter_name, parameter in layer.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        noise = 1 + 0.3 * noise if "norm" in parameter_name else 0.6 * noise
        parameter.data.copy_(noise)
    return layer


def record(tree: Path, out: Path, name: str) -> None:
    """Write ``NAME.safetensors`` and ``NAME.json``: two segments, the second after the first."""
    layer = layer_of(tree, name)
    generator = torch.Generator().manual_seed(50)
    tensors = {f"param.{n}": p.detach().float() for n, p in layer.named_parameters()}
    cache = Cache()
    loss = torch.zeros((), dtype=torch.float64)
    leaves = dict(layer.named_parameters())
    for n, length in enumerate(SEGMENTS):
        x = torch.randn(B, length, D, generator=generator)
        tensors[f"in.seg{n}.x"] = x
        leaves[f"in.seg{n}.x"] = x.double().requires_grad_()
        given = {"past_key_values": cache, "use_cache": True}
        if name == "rwkv7":
            first = torch.randn(B, length, D, generator=generator)
            tensors[f"in.seg{n}.v_first"] = first
            leaves[f"in.seg{n}.v_first"] = given["v_first"] = first.double().requires_grad_()
        y = layer(leaves[f"in.seg{n}.x"], **given)[0]
        up = torch.randn(y.shape, generator=generator)
        tensors |= {f"in.seg{n}.w_o": up, f"f64.seg{n}.o": y}
        loss = loss + (y * up).sum()
    state = cache["recurrent_state"]
    up = torch.randn(state.shape, generator=generator)
    loss = loss + (state * up).sum()
    tensors |= {"in.w_state": up, "f64.state": state, "f64.loss": loss}
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    for n, gradient in zip(leaves, gradients, strict=True):
        key = f"gradin.{n.removeprefix('in.')}" if n.startswith("in.") else f"grad.{n}"
        tensors[f"f64.{key}"] = gradient
    tensors = {n: t.detach().contiguous() for n, t in tensors.items()}
    save_file(tensors, out / f"{name}.safetensors")
    file, kind, options = LAYERS[name]
    about = {
        "set": out.name,
        "name": name,
        "file": f"{name}.safetensors",
        "peer": {
            "repo": "fla-org/flash-linear-attention",
            "release": VERSION,
            "file": f"fla/layers/{file}.py",
            "class": kind,
        },
        "what": "A layer over the package's plain recurrence; states are [B, H, K, V]",
        "config": SIZES | options | {"cls": kind, "B": B, "segments": list(SEGMENTS)},
        "tied_parameters": [],
        "parameters_without_gradient": [],
    }
    (out / f"{name}.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    warnings.simplefilter("ignore")
    stand_ins(source)
    target.mkdir(exist_ok=True)
    for case in LAYERS:
        record(source, target, case)
