"""minGRU-pytorch 0.2.1: minLSTM reads on differently in one call and step by step."""

import torch
from minGRU_pytorch.minGRU import minGRU
from minGRU_pytorch.minLSTM import minLSTM

torch.set_grad_enabled(False)
for kind in (minGRU, minLSTM):
    torch.manual_seed(0)
    module = kind(dim=8)
    x = torch.randn(2, 8, 8)
    _, hidden = module(x[:, :4], return_next_prev_hidden=True)

    together = module(x[:, 4:], prev_hidden=hidden)
    steps = []
    for t in range(4, 8):
        y, hidden = module(x[:, t : t + 1], prev_hidden=hidden, return_next_prev_hidden=True)
        steps.append(y)
    apart = (together - torch.cat(steps, 1)).abs().max() / together.std()
    print(f"{kind.__name__}: off by {apart:.1e} deviations")
