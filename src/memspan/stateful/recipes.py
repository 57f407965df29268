"""Architectures of transformers made small and random: a table of configs, and the weights.

Every internal length is short enough that a few hundred tokens cross it several times, and every kind
of layer occurs. A type that is not in the table cannot be made.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from memspan.stateful.caches import Causal
from memspan.stateful.protocol import Padding

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""What recipes share; configs ignore what they do not know."""
WINDOW, CHUNK = 8, 8
"""Tokens."""
VOCABULARY = 64


@dataclass(frozen=True)
class Recipe:
    """What a small model of a type has beside :data:`SIZES`."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Of its config."""
    lengths: Mapping[str, int] = field(default_factory=dict)
    """Internal lengths that are constants of its code."""
    padding: frozenset[Padding] | None = None
    """What its documentation promises, where that differs."""


def recipe(
    lengths: Mapping[str, int] | None = None,
    padding: frozenset[Padding] | None = None,
    **options: Any,
) -> Recipe:
    """A line of the table."""
    return Recipe(options, lengths or {}, padding)


EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
}
DELTA: dict[str, Any] = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA: dict[str, Any] = {"mamba_d_state": 8, "mamba_d_conv": 4}
MAMBA_2: dict[str, Any] = {
    **MAMBA,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": CHUNK,
}
RECURRENT = ["mamba", "attention"]
GATED_DELTA = {"chunk": 64}
"""Its chunk is an argument's default."""

RECIPES: dict[str, Recipe] = {
    # Attention to everything so far.
    "llama": recipe(),
    "gpt2": recipe(n_positions=1024),
    "gpt_neox": recipe(),
    "opt": recipe(word_embed_proj_dim=32, ffn_dim=48),
    "bloom": recipe(n_head=4, n_layer=2),
    "falcon": recipe(),
    "phi": recipe(),
    "phi3": recipe(),
    "qwen2": recipe(),
    "qwen3": recipe(),
    "olmo2": recipe(),
    "stablelm": recipe(),
    "mixtral": recipe(**EXPERTS),
    "qwen3_moe": recipe(**EXPERTS),
    "deepseek_v3": recipe(
        **EXPERTS,
        num_key_value_heads=4,
        n_group=2,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
    ),
    # A window, in all layers or in some.
    "mistral": recipe(sliding_window=WINDOW),
    "starcoder2": recipe(sliding_window=WINDOW),
    "gpt_neo": recipe(
        window_size=WINDOW, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]
    ),
    "gemma2": recipe(sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]),
    "gemma3_text": recipe(
        sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
    "cohere2": recipe(sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]),
    "gpt_oss": recipe(
        **EXPERTS, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
    "llama4_text": recipe(
        **EXPERTS,
        intermediate_size_mlp=48,
        attention_chunk_size=CHUNK,
        layer_types=["chunked_attention", "full_attention"],
    ),
    # Recurrent.
    "mamba": recipe(state_size=8, time_step_rank=4),
    "falcon_mamba": recipe(state_size=8, time_step_rank=4),
    "mamba2": recipe(state_size=8, num_heads=8, head_dim=8, n_groups=2, chunk_size=CHUNK),
    "rwkv": recipe(padding=frozenset(), attention_hidden_size=32, rescale_every=0),
    "xlstm": recipe(hidden_size=128, num_heads=2, chunk_size=16),
    # Both.
    "jamba": recipe(
        **EXPERTS,
        **MAMBA,
        use_mamba_kernels=False,
        mamba_dt_rank=4,
        attn_layer_period=2,
        attn_layer_offset=1,
    ),
    "bamba": recipe(**MAMBA_2, attn_layer_indices=[1]),
    "zamba": recipe(
        **MAMBA,
        use_mamba_kernels=False,
        mamba_dt_rank=4,
        attention_head_dim=16,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_hidden_layers=5,
    ),
    "zamba2": recipe(
        mamba_d_state=8,
        mamba_ngroups=2,
        n_mamba_heads=8,
        mamba_headdim=8,
        chunk_size=CHUNK,
        layers_block_type=["mamba", "hybrid", "mamba"],
        num_hidden_layers=3,
    ),
    "nemotron_h": recipe(
        **EXPERTS,
        layers_block_type=["mamba", "attention", "moe", "mamba"],
        ssm_state_size=8,
        mamba_num_heads=8,
        mamba_head_dim=8,
        n_groups=2,
        chunk_size=CHUNK,
    ),
    "falcon_h1": recipe(**MAMBA_2, mamba_d_ssm=64),
    "granitemoehybrid": recipe(**EXPERTS, **MAMBA_2, layer_types=RECURRENT),
    "qwen3_next": recipe(GATED_DELTA, **EXPERTS, **DELTA),
    "qwen3_5_text": recipe(GATED_DELTA, **DELTA),
    "qwen3_5_moe_text": recipe(GATED_DELTA, **EXPERTS, **DELTA),
    "olmo_hybrid": recipe(GATED_DELTA, **DELTA),
    "kimi_linear": recipe(
        GATED_DELTA,
        **EXPERTS,
        num_key_value_heads=4,
        linear_head_dim=8,
        linear_num_heads=4,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    ),
    "bailing_hybrid": recipe(
        GATED_DELTA,
        **EXPERTS,
        num_key_value_heads=4,
        n_group=2,
        topk_group=1,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    ),
    "minimax": recipe(
        **EXPERTS, block_size=CHUNK, layer_types=["full_attention", "linear_attention"]
    ),
    "lfm2": recipe(conv_L_cache=3, layer_types=["conv", "full_attention"]),
    "lfm2_moe": recipe(
        **EXPERTS, conv_L_cache=3, num_dense_layers=1, layer_types=["conv", "full_attention"]
    ),
    "lfm3": recipe(
        sliding_window=WINDOW,
        num_hidden_layers=3,
        layer_types=["conv", "sliding_attention", "full_attention"],
    ),
    "zaya": recipe(**{**EXPERTS, "num_experts_per_tok": 1}, router_hidden_size=16),
    "gemma4_text": recipe(
        sliding_window=WINDOW,
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=8,
        num_global_key_value_heads=2,
        global_head_dim=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "recurrent_gemma": recipe(
        lru_width=32,
        attention_window_size=WINDOW,
        block_types=["recurrent", "attention"],
    ),
}
"""Type -> recipe."""


def build(model_type: str, seed: int = 0, vocab_size: int = VOCABULARY) -> Causal:
    """A small model of that type with random weights.

    Raises:
        KeyError: there is no recipe.
        RefusedError: this version of transformers cannot make or read it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    made = RECIPES[model_type]
    kind = type(AutoConfig.for_model(model_type))
    # Some derive a width from others.
    sizes = {
        n: size for n, size in SIZES.items() if not isinstance(getattr(kind, n, None), property)
    }
    options = {"vocab_size": vocab_size, **sizes, **made.options}
    with torch.random.fork_rng():
        # What is not randomised below may be drawn, too.
        torch.manual_seed(seed)
        config = AutoConfig.for_model(model_type, **options)
        model = AutoModelForCausalLM.from_config(config)
    randomise(model, seed)
    script = f"""\
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM


{inspect.getsource(randomise)}

options = {options}
torch.manual_seed({seed})
config = AutoConfig.for_model({model_type!r}, **options)
module = AutoModelForCausalLM.from_config(config).eval()
randomise(module, {seed})"""
    return Causal(model.eval(), made.lengths, made.padding, script)


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> None:
    """Weights so large that all that was read matters, which at initialisation it hardly does."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("weight") and parameter.dim() > 1:
            parameter.copy_(noise / parameter[0].numel() ** 0.5)
        elif not name.endswith(("A_log", "dt_bias")):
            parameter.add_(0.1 * noise)
