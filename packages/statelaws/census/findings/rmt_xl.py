"""recurrent-memory-transformer-pytorch 0.7.0: forward drops the XL memories between its segments."""

import torch
from recurrent_memory_transformer_pytorch import (
    RecurrentMemoryTransformer,
    RecurrentMemoryTransformerWrapper,
)

torch.set_grad_enabled(False)
torch.manual_seed(0)
transformer = RecurrentMemoryTransformer(
    dim=32, num_tokens=64, depth=2, num_memory_tokens=3, seq_len=8, dim_head=16, heads=2,
    use_xl_memories=True, xl_mem_len=8,
).eval()  # fmt: skip
wrapper = RecurrentMemoryTransformerWrapper(transformer)
tokens = torch.randint(64, (2, 24))

together, _ = wrapper(tokens)
outputs = []
memories = None
xl_memories = None
for segment in tokens.split(8, 1):
    y, memories, xl_memories = transformer(segment, memories, xl_memories=xl_memories)
    outputs.append(y)
for i, (a, b) in enumerate(zip(together.split(8, 1), outputs, strict=True)):
    print(f"segment {i}: off by {((a - b).abs().max() / b.std()).item():.1e} deviations")
