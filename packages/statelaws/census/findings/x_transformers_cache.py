"""x-transformers 2.31.10: a cache changes outputs with shifted tokens and forgetting attention."""

import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

torch.set_grad_enabled(False)
for options in (
    {"rotary_pos_emb": True},
    {"rotary_pos_emb": True, "shift_tokens": 1},
    {"attn_data_dependent_alibi": True},
    {"attn_data_dependent_alibi": True, "attn_data_dependent_alibi_per_row": True},
):
    torch.manual_seed(0)
    layers = Decoder(dim=64, depth=2, heads=2, attn_dim_head=32, **options)
    net = TransformerWrapper(num_tokens=64, max_seq_len=128, attn_layers=layers).eval()
    tokens = torch.randint(64, (2, 32))

    together = net(tokens)
    y, cache = net(tokens[:, :16], return_intermediates=True)
    outputs = [y]
    for stop in range(17, 33):
        y, cache = net(tokens[:, :stop], cache=cache, return_intermediates=True)
        outputs.append(y[:, -1:])
    apart = (together - torch.cat(outputs, 1)).abs().max() / together.std()

    model = AutoregressiveWrapper(net)
    texts = [model.generate(tokens, 16, temperature=0.0, cache_kv=cache_kv) for cache_kv in (0, 1)]
    differ = (texts[0] != texts[1]).sum().item()
    print(f"{options}: off by {apart:.1e} deviations; {differ} of 32 generated tokens differ")
