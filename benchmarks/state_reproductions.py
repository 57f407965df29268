"""What docs/state-laws.md says of each broken law, with transformers alone: call, expected, seen.

    python benchmarks/state_reproductions.py [NAME ...]

Two rows of eight tokens, read in one call or in two, by small models with random weights. Differences
are the largest of the logits over their standard deviation.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from torch import Tensor, nn

TOKENS = torch.arange(16).reshape(2, 8)
MASK = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1, 1]])
SHARED: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LIMIT = {"time_step_limit": (0.0, 0.1)}
HEADS = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1}
OPTIONS: dict[str, dict[str, Any]] = {
    "mamba": {"num_hidden_layers": 2},
    "falcon_mamba": {"num_hidden_layers": 2},
    "jamba": {
        "num_hidden_layers": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 2,
    },
    "zamba": {"num_hidden_layers": 5, "attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "mamba", "attention", "mamba"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "head_dim": 8,
        "n_groups": 1,
    },
    "rwkv": {"num_hidden_layers": 2, "rescale_every": 0},
    "minimax": {
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "linear_attention"],
        "num_local_experts": 2,
        "head_dim": 8,
    },
    "recurrent_gemma": {
        "num_hidden_layers": 2,
        "block_types": ["recurrent", "attention"],
        "lru_width": 32,
    },
    "bloom": {"n_layer": 2, "n_head": 4},
    "bamba": {"num_hidden_layers": 2, "attn_layer_indices": [1], **HEADS},
    "mamba2": {**LIMIT, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "n_groups": 1},
    "falcon_h1": {**LIMIT, "num_hidden_layers": 2, "mamba_d_ssm": 64, "head_dim": 8, **HEADS},
    "granitemoehybrid": {
        **LIMIT,
        "num_hidden_layers": 2,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "shared_intermediate_size": 24,
        **HEADS,
    },
    "gemma2": {"num_hidden_layers": 2, "head_dim": 8, "sliding_window": 4},
}


def made(name: str) -> nn.Module:
    """A small model in evaluation mode, with weights so large that its state matters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **SHARED, **OPTIONS[name])
    model = AutoModelForCausalLM.from_config(config).eval()
    for key, weight in model.named_parameters():
        if weight.dim() > 1 and not key.endswith("A_log"):
            weight.normal_(std=weight[0].numel() ** -0.5)
    return model


def apart(expected: Tensor, seen: Tensor) -> float:
    """The largest difference over the standard deviation."""
    return ((seen - expected).abs().max() / expected.std()).item()


def second_call(model: nn.Module, cache: str, first: int = 4) -> list[float]:
    """Reading on in one call, and token by token, against all in one call."""
    expected = model(TOKENS).logits[:, first:]
    before = model(TOKENS[:, :first], use_cache=True)[cache]
    together = model(TOKENS[:, first:], **{cache: before}).logits
    state = model(TOKENS[:, :first], use_cache=True)[cache]
    single = [model(TOKENS[:, t : t + 1], **{cache: state}).logits for t in range(first, 8)]
    return [apart(expected, together), apart(expected, torch.cat(single, 1))]


def cut(model: nn.Module) -> list[str]:
    alone = model.config.model_type in ("mamba", "falcon_mamba", "mamba2")
    cache = "cache_params" if alone else "past_key_values"
    together, single = second_call(model, cache)
    return [f"four tokens after four: {together:.1g}; one by one: {single:.1g}"]


def rwkv(model: nn.Module) -> list[str]:
    state = model(TOKENS[:, :7], use_cache=True).state
    shape = list(model(TOKENS[:, 7:], state=state).logits.shape)
    options = {"max_new_tokens": 3, "do_sample": False, "output_logits": True}
    options["return_dict_in_generate"] = True
    both, alone = (model.generate(rows, **options).logits for rows in (TOKENS, TOKENS[:1]))
    steps = [f"{apart(b[:1], a):.1g}" for a, b in zip(both, alone, strict=True)]
    return [
        f"logits of one token, two rows: {shape}",
        f"generate, first row beside another and alone, by step: {', '.join(steps)}",
    ]


def minimax(model: nn.Module) -> list[str]:
    rows, lines = torch.tensor([1, 0]), []
    expected = model(TOKENS[rows]).logits[:, 7:]
    for method in ("reorder_cache", "batch_select_indices"):
        cache = model(TOKENS[:, :7], use_cache=True).past_key_values
        getattr(cache, method)(rows)
        seen = model(TOKENS[rows, 7:], past_key_values=cache).logits
        lines.append(f"one token after {method}: {apart(expected, seen):.1g}")
    return lines


def recurrent_gemma(model: nn.Module) -> list[str]:
    options: dict[str, Any] = {"max_new_tokens": 1, "output_logits": True}
    options |= {"return_dict_in_generate": True, "do_sample": False}
    first = model.generate(TOKENS[:, :1], **options).logits[0]
    model.generate(TOKENS[:, 1:5], **options)
    again = model.generate(TOKENS[:, :1], **options).logits[0]
    return [f"generate from one token, before and after another text: {apart(first, again):.1g}"]


def padded(model: nn.Module) -> list[str]:
    lines = []
    positions = {"position_ids": (MASK.cumsum(1) - 1).clamp(min=0)}
    given = positions if "position_ids" in model.forward.__code__.co_varnames else {}
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)
        alone = model(TOKENS[1:, 3:]).logits
        seen = model(TOKENS, attention_mask=MASK, **given).logits[1:, 3:]
        lines.append(f"{str(dtype)[6:]}, real tokens after padding: {apart(alone, seen):.1g}")
    return lines


SHOWN: dict[str, Callable[[nn.Module], list[str]]] = {
    "mamba": cut,
    "falcon_mamba": cut,
    "jamba": cut,
    "zamba": cut,
    "zamba2": cut,
    "nemotron_h": cut,
    "rwkv": rwkv,
    "minimax": minimax,
    "recurrent_gemma": recurrent_gemma,
    "bloom": padded,
    "gemma2": padded,
    # Beside the table: without position_ids, and with a limit of the time step that is not the default.
    "bamba": cut,
    "mamba2": cut,
    "falcon_h1": cut,
    "granitemoehybrid": cut,
}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    for name in parser.parse_args().names or SHOWN:
        for line in SHOWN[name](made(name)):
            print(f"{name}: {line}")


if __name__ == "__main__":
    main()
