"""A cache that recorded its past is cropped by three tokens, against one that never read them."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

torch.set_grad_enabled(False)
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
HEADS = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
TYPES = {
    "llama": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    "qwen3_5_text": HEADS,
    "olmo_hybrid": HEADS,
}


def read(model, pieces, cache):
    for piece in pieces:
        logits = model(piece, cache=cache, use_cache=True).logits
    return logits


for name, options in TYPES.items():
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **SIZES, **options)
    model = AutoModelForCausalLM.from_config(config).eval()
    tokens = torch.randint(64, (1, 15))

    expected = read(model, [tokens[:, :8], tokens[:, 11:]], DynamicCache(config=config))
    cache = DynamicCache(config=config)
    cache.activate_past_recording()
    read(model, [tokens[:, :8], tokens[:, 8:11]], cache)
    croppable = cache.is_croppable
    try:
        cache.crop(-3)
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {error}")
        continue
    seen = read(model, [tokens[:, 11:]], cache)
    off = (seen - expected).abs().max() / expected.std()
    print(f"{name}: off by {off:.1e} deviations; is_croppable {croppable}")
