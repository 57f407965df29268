"""Small random models of transformers' architectures: a table of configs, and the weights.

Every internal length is short enough that a few hundred tokens cross it several times, and every kind
of layer occurs. Types that are not in the table cannot be made.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from statelaws.adapters.transformers import Causal
from statelaws.errors import RefusedError
from statelaws.protocol import Padding

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
"""Options that recipes share; configs ignore those that they do not know."""
WINDOW = 8
CHUNK = 8
"""Tokens."""
VOCABULARY = 64


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
SLIDING: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
LATENT: dict[str, Any] = {
    **EXPERTS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
GROUPED: dict[str, Any] = {**LATENT, "n_group": 2, "topk_group": 1}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
ALTERNATING: dict[str, Any] = {
    **MAMBA,
    "use_mamba_kernels": False,
    "mamba_dt_rank": 4,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
}

RECIPES: dict[str, dict[str, Any]] = {
    # Full attention.
    "llama": {},
    "gpt2": {"n_positions": 1024},
    "gpt_neox": {},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48},
    "bloom": {"n_head": 4, "n_layer": 2},
    "falcon": {},
    "phi": {},
    "phi3": {},
    "qwen2": {},
    "qwen3": {},
    "olmo2": {},
    "stablelm": {},
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS,
    "deepseek_v3": {**GROUPED, "q_lora_rank": 16, "first_k_dense_replace": 1},
    # A window, in all layers or in some.
    "mistral": {"sliding_window": WINDOW},
    "starcoder2": {"sliding_window": WINDOW},
    "gpt_neo": {
        "window_size": WINDOW,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
    },
    "gemma2": SLIDING,
    "gemma3_text": SLIDING,
    "cohere2": SLIDING,
    "gpt_oss": EXPERTS | SLIDING,
    "llama4_text": {
        **EXPERTS,
        "intermediate_size_mlp": 48,
        "attention_chunk_size": CHUNK,
        "layer_types": ["chunked_attention", "full_attention"],
    },
    # Recurrent.
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4},
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": CHUNK},
    "rwkv": {"attention_hidden_size": 32, "rescale_every": 0},
    "xlstm": {"hidden_size": 128, "num_heads": 2, "chunk_size": 16},
    # Both.
    "jamba": EXPERTS | ALTERNATING,
    "bamba": {**MAMBA_2, "attn_layer_indices": [1]},
    "zamba": {**ALTERNATING, "attention_head_dim": 16, "num_hidden_layers": 5},
    "zamba2": {
        "mamba_d_state": 8,
        "mamba_ngroups": 2,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "chunk_size": CHUNK,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "num_hidden_layers": 3,
    },
    "nemotron_h": {
        **EXPERTS,
        "layers_block_type": ["mamba", "attention", "moe", "mamba"],
        "ssm_state_size": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "chunk_size": CHUNK,
    },
    "falcon_h1": {**MAMBA_2, "mamba_d_ssm": 64},
    "granitemoehybrid": {**EXPERTS, **MAMBA_2, "layer_types": ["mamba", "attention"]},
    "qwen3_next": EXPERTS | DELTA,
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": EXPERTS | DELTA,
    "olmo_hybrid": DELTA,
    "kimi_linear": {**LATENT, **LINEAR, "linear_head_dim": 8, "linear_num_heads": 4},
    "bailing_hybrid": GROUPED | LINEAR,
    "minimax": {
        **EXPERTS,
        "block_size": CHUNK,
        "layer_types": ["full_attention", "linear_attention"],
    },
    "lfm2": {"conv_L_cache": 3, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {
        **EXPERTS,
        "conv_L_cache": 3,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention"],
    },
    "lfm3": {
        "sliding_window": WINDOW,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "sliding_attention", "full_attention"],
    },
    "zaya": {**EXPERTS, "num_experts_per_tok": 1, "router_hidden_size": 16},
    "gemma4_text": {
        **SLIDING,
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8,
        "num_global_key_value_heads": 2,
        "global_head_dim": 8,
    },
    "recurrent_gemma": {
        "lru_width": 32,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "attention"],
    },
}
"""Options of small models besides :data:`SIZES`, by type."""
GATED_DELTA = (
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
    *("olmo_hybrid", "kimi_linear", "bailing_hybrid"),
)
CODED: dict[str, dict[str, int]] = {name: {"chunk": 64} for name in GATED_DELTA}
"""Internal lengths that no config names: the chunk of the gated delta rule is an argument's default."""
PADDING: dict[str, frozenset[Padding]] = {"rwkv": frozenset()}
"""Padding that the documentation promises to ignore, by type, where that is unusual."""


def build(model_type: str, seed: int = 0, vocab_size: int = VOCABULARY) -> Causal:
    """A small model of that type with random weights.

    Raises:
        KeyError: there is no recipe.
        RefusedError: this version of transformers cannot make or read it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, __version__

    recipe = RECIPES[model_type]
    with torch.random.fork_rng():
        # Some weights that are not randomised below may be drawn here.
        torch.manual_seed(seed)
        try:
            kind = type(AutoConfig.for_model(model_type))
            # Some derive a width from others.
            derived = {n for n in SIZES if isinstance(getattr(kind, n, None), property)}
            sizes = {n: size for n, size in SIZES.items() if n not in derived}
            options = {"vocab_size": vocab_size, **sizes, **recipe}
            config = AutoConfig.for_model(model_type, **options)
            model = AutoModelForCausalLM.from_config(config)
        except Exception as error:
            # Earlier versions lack types and options, and say so by errors of many kinds.
            message = " ".join(str(error).split())
            raise RefusedError(f"transformers {__version__} cannot make it: {message}") from error
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
    return Causal(model.eval(), CODED.get(model_type), PADDING.get(model_type), script)


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> None:
    """Weights large enough that everything read matters, which it hardly does at initialisation."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("weight") and parameter.dim() > 1:
            parameter.copy_(noise / parameter[0].numel() ** 0.5)
        elif not name.endswith(("A_log", "dt_bias")):
            parameter.add_(0.1 * noise)
