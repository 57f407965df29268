"""Faults planted again in right code, where the project that had them cannot run here.

Each class is right; where :data:`SIDE` is faulty, it does what the report says. Written for this test,
after the reports' descriptions: no project's code is used. Imported by models.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from registry import Make, bug
from statelaws import Claims, Inputs

SIDE = "faulty"
"""Set by models.py."""
WIDTH = 16


class Layer:
    """Two projections beside a state, batch first."""

    claims = Claims(bounded=False, carries_gradients=False)
    inputs = Inputs(width=WIDTH)

    def __init__(self) -> None:
        torch.manual_seed(0)
        names = ("q", "k", "v", "beta")
        self.module = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in names})
        with torch.no_grad():
            for weight in self.module.parameters():
                weight.normal_(0, 2 * WIDTH**-0.5)

    @property
    def faulty(self) -> bool:
        return SIDE == "faulty"

    def select(self, state: Any, rows: Tensor) -> Any:
        return tuple(part[rows] for part in state)

    def copy(self, state: Any) -> Any:
        return tuple(part.clone() for part in state)

    def start(self, batch_size: int) -> Any:
        empty = torch.zeros(batch_size, 0, WIDTH)
        return empty, empty.clone()

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.module[name](x) for name in ("q", "k", "v"))

    def attended(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        scores = q @ k.mT / WIDTH**0.5 + bias
        return scores.softmax(-1) @ v


def distances(queries: int, keys: int) -> Tensor:
    """Distances from each query back to each key, ``[queries, keys]``; the last are the same token."""
    return torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)


def hidden(forbidden: Tensor) -> Tensor:
    return torch.zeros(forbidden.shape).masked_fill(forbidden, -1e9)


class GatedDelta(Layer):
    """A short convolution, then a delta rule; a later segment of several tokens begins anew."""

    claims = Claims(lengths={"convolution": 4}, carries_gradients=False)
    kernel = 4

    def start(self, batch_size: int) -> Any:
        window = torch.zeros(batch_size, self.kernel - 1, WIDTH)
        return window, torch.zeros(batch_size, WIDTH, WIDTH)

    def read(self, inputs: Tensor, state: Any) -> Any:
        window, s = state
        if self.faulty and inputs.shape[1] > 1:
            window, s = self.start(len(inputs))
        joined = torch.cat([window, inputs], 1)
        n = inputs.shape[1]
        x = sum(joined[:, i : i + n] * (i + 1) for i in range(self.kernel)) / 10
        q, k, v = self.projected(x.tanh())
        k = nn.functional.normalize(k, dim=-1)
        beta = self.module["beta"](x)[..., :1].sigmoid()
        outputs = []
        for t in range(n):
            error = v[:, t] - (k[:, t, None] @ s)[:, 0]
            s = 0.95 * s + k[:, t, :, None] * (beta[:, t] * error)[:, None]
            outputs.append((q[:, t, None] @ s)[:, 0])
        return torch.stack(outputs, 1), (joined[:, 1 - self.kernel :], s)


@bug("fla-chunkwise-inference")
def _() -> dict[str, Make]:
    return {"gated delta rule": GatedDelta}


class Alibi(Layer):
    """Attention with a bias of distance; the bias is built over the call's own tokens."""

    def read(self, inputs: Tensor, state: Any) -> Any:
        q, k, v = self.projected(inputs)
        k, v = (torch.cat(pair, 1) for pair in zip(state, (k, v), strict=True))
        back = distances(inputs.shape[1], k.shape[1])
        bias = -0.5 * back
        if self.faulty and inputs.shape[1] == 1:
            bias = torch.zeros(1, 1)
        return self.attended(q, k, v, bias + hidden(back < 0)), (k, v)


@bug("falcon-alibi-single-steps")
def _() -> dict[str, Make]:
    return {"attention": Alibi}


class Window(Layer):
    """Attention in a window over all keys; later segments have their first token's window."""

    claims = Claims(bounded=False, lengths={"window": 6}, carries_gradients=False)
    window = 6

    def read(self, inputs: Tensor, state: Any) -> Any:
        q, k, v = self.projected(inputs)
        before = state[0].shape[1]
        k, v = (torch.cat(pair, 1) for pair in zip(state, (k, v), strict=True))
        back = distances(inputs.shape[1], k.shape[1])
        beyond = back >= self.window
        if self.faulty and before:
            beyond[:, :before] = beyond[:1, :before]
        return self.attended(q, k, v, hidden((back < 0) | beyond)), (k, v)


@bug("window-of-chunked-prefill")
def _() -> dict[str, Make]:
    return {"attention in a window": Window}


class Roomy(Layer):
    """Chunked attention; the cache has room for steps of four, and is trimmed by its room."""

    claims = Claims(lengths={"chunk": 8}, carries_gradients=False)
    chunk = 8
    step = 4

    def start(self, batch_size: int) -> Any:
        empty = torch.zeros(batch_size, 0, WIDTH)
        return empty, empty.clone(), torch.zeros(batch_size, 2, dtype=torch.long)

    def read(self, inputs: Tensor, state: Any) -> Any:
        room_k, room_v, counts = state
        offset, begins = counts[0].tolist()
        q, k, v = self.projected(inputs)
        if self.faulty and inputs.shape[1] == 1 and room_k.shape[1] >= self.chunk:
            # What is kept should be counted in tokens.
            cut = room_k.shape[1] - self.chunk + 1
            room_k = room_k[:, cut:]
            room_v = room_v[:, cut:]
            begins += cut
        held = offset - begins
        k, v = (torch.cat([old[:, :held], new], 1) for old, new in ((room_k, k), (room_v, v)))
        places = torch.arange(begins, begins + k.shape[1])
        own = torch.arange(offset, offset + inputs.shape[1])[:, None]
        forbidden = (places > own) | (places // self.chunk != own // self.chunk)
        y = self.attended(q, k, v, hidden(forbidden)) + inputs
        offset += inputs.shape[1]
        drop = max(0, (offset // self.chunk) * self.chunk - begins)
        drop = min(drop, k.shape[1])
        if not self.faulty or inputs.shape[1] > 1:
            k = k[:, drop:]
            v = v[:, drop:]
            begins += drop
        spare = -k.shape[1] % self.step
        k, v = (nn.functional.pad(each, (0, 0, 0, spare)) for each in (k, v))
        return y, (k, v, torch.tensor([[offset, begins]]).expand(len(inputs), 2))


@bug("chunked-cache-trimmed-by-room")
def _() -> dict[str, Make]:
    return {"chunked attention": Roomy}


class Sorted(Layer):
    """A GRU over rows that are sorted by length; they are put back in place, one over another."""

    claims = Claims(padding=frozenset({"right"}))

    def __init__(self) -> None:
        super().__init__()
        self.module["cell"] = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def start(self, batch_size: int) -> Any:
        return (torch.zeros(batch_size, WIDTH),)

    def read(self, inputs: Tensor, state: Any) -> Any:
        y, h = self.module["cell"](inputs, state[0][None])
        return y, (h[0],)

    def read_padded(self, inputs: Tensor, state: Any, lengths: Tensor, side: str) -> Any:
        order = lengths.argsort(descending=True)
        rnn = nn.utils.rnn
        packed = rnn.pack_padded_sequence(inputs[order], lengths[order], True)
        y, h = self.module["cell"](packed, state[0][self.sorted(order)][None])
        y = rnn.pad_packed_sequence(y, True, total_length=inputs.shape[1])[0]
        return self.back(y, order), (self.back(h[0], order),)

    def sorted(self, order: Tensor) -> Tensor:
        return order

    def back(self, value: Tensor, order: Tensor) -> Tensor:
        return value[order.argsort()]


class BackInPlace(Sorted):
    def back(self, value: Tensor, order: Tensor) -> Tensor:
        if not self.faulty:
            return super().back(value, order)
        value = value.clone()
        for i, place in enumerate(order.tolist()):
            value[place] = value[i].clone()
        return value


class StatesUnsorted(Sorted):
    def sorted(self, order: Tensor) -> Tensor:
        return torch.arange(len(order)) if self.faulty else order


@bug("unsorted-in-place")
def _() -> dict[str, Make]:
    return {"GRU": BackInPlace}


@bug("stateful-sorting")
def _() -> dict[str, Make]:
    return {"GRU": StatesUnsorted}


class KeepsItsCache(Layer):
    """The model keeps the keys; a new text resets them, but not the flag that there are some."""

    def __init__(self) -> None:
        super().__init__()
        self.flag = False
        self.kept: Any = None

    def read(self, inputs: Tensor, state: Any) -> Any:
        q, k, v = self.projected(inputs)
        if self.faulty and not state[0].shape[1] and self.flag and len(self.kept[0]) == len(inputs):
            state = tuple(part[:, -1:] for part in self.kept)
        k, v = (torch.cat(pair, 1) for pair in zip(state, (k, v), strict=True))
        self.flag = True
        self.kept = (k.detach(), v.detach())
        back = distances(inputs.shape[1], k.shape[1])
        return self.attended(q, k, v, hidden(back < 0)), (k, v)


@bug("lag-llama-cache")
def _() -> dict[str, Make]:
    return {"attention": KeepsItsCache}


class Stored(Layer):
    """Two layers; states are stored rows first, and reshaped where axes are to be swapped."""

    claims = Claims()

    def __init__(self) -> None:
        super().__init__()
        self.module["cells"] = nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def start(self, batch_size: int) -> Any:
        return (torch.zeros(batch_size, 2, WIDTH),)

    def read(self, inputs: Tensor, state: Any) -> Any:
        y, h = self.module["cells"](inputs, state[0].transpose(0, 1).contiguous())
        return y, (h.transpose(0, 1),)

    def reset(self, state: Any, rows: Tensor) -> Any:
        return (torch.where(rows[:, None, None], 0.0, state[0]),)

    def replay(self, inputs: Tensor, state: Any, starts: Tensor) -> Tensor:
        stored = state[0]
        if self.faulty:
            stored = stored.reshape(2, len(inputs), WIDTH).transpose(0, 1)
        state = (stored,)
        outputs = []
        for t in range(inputs.shape[1]):
            y, state = self.read(inputs[:, t : t + 1], self.reset(state, starts[:, t]))
            outputs.append(y)
        return torch.cat(outputs, 1)


@bug("recurrent-ppo-reshaped-states")
def _() -> dict[str, Make]:
    return {"two layers": Stored}
