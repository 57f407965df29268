"""transformers 5.24.0: Mimi's padding cache changes with the buffer that audio was given in."""

import torch
from transformers import MimiConfig, MimiModel

torch.set_grad_enabled(False)
torch.manual_seed(0)
config = MimiConfig(
    hidden_size=32, num_filters=8, upsampling_ratios=[2], codebook_size=16, codebook_dim=8,
    num_quantizers=2, vector_quantization_hidden_dimension=8, upsample_groups=32,
    num_hidden_layers=2, intermediate_size=48, num_attention_heads=4, num_key_value_heads=4,
    sliding_window=8,
)  # fmt: skip
model = MimiModel(config).eval()
# What is rounded to codes.
embeddings = []
model.downsample.register_forward_hook(lambda module, given, result: embeddings.append(result))
audio = torch.randn(1, 1, 16)
for reused in (False, True):
    buffer = audio[..., :8].clone()
    first = model.encode(buffer, use_streaming=True, return_dict=True)
    if reused:
        buffer.copy_(audio[..., 8:])
    model.encode(
        audio[..., 8:],
        encoder_cache=first.encoder_cache,
        padding_cache=first.padding_cache,
        use_streaming=True,
        return_dict=True,
    )
apart = (embeddings[3] - embeddings[1]).abs().max() / embeddings[1].std()
print(f"with one buffer for both pieces: off by {apart:.1e} deviations")
