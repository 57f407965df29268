"""Right models of many kinds, with a chunk or a whole segment at once and with single steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from small_models import WIDTH, Attention, Convolved, Gated, Read, Sliding, State, Twin, turned
from statelaws import Claims, Function, Inputs, Recurrent

RIGHT: dict[str, Callable[[], Any]] = {}
"""Functions that make each, by name."""
LOW: dict[str, Callable[[torch.dtype], Any]] = {}
"""Functions that make some in a type of two bytes."""
CHUNK = 8


def right(name: str, *options: Any, **named: Any) -> Callable[[Any], Any]:
    def add(kind: Any) -> Any:
        RIGHT[name] = lambda: kind(*options, **named)
        return kind

    return add


class Mixer(Twin):
    """One that says what of padding and documents it supports: nothing."""

    claims = Claims()
    read_padded: Any = None
    read_packed: Any = None


# ----- Linear recurrences, in parallel and step by step


@right("linear attention, chunks of 8", normalised=True)
@right("linear attention without a denominator", normalised=False)
class Linear(Mixer):
    claims = Claims(lengths={"chunk": CHUNK})

    def __init__(self, normalised: bool, **options: Any) -> None:
        super().__init__(**options)
        self.normalised = normalised

    def layers(self) -> dict[str, nn.Module]:
        return {name: nn.Linear(WIDTH, WIDTH) for name in ("query", "key", "value")}

    def start(self, batch_size: int) -> State:
        s = torch.zeros(batch_size, WIDTH, WIDTH, dtype=self.dtype)
        return {"s": s, "z": s[:, 0].clone()}

    def mix(self, x: Tensor, state: State) -> Read:
        q, k = (F.elu(self.module[name](x)) + 1 for name in ("query", "key"))
        v = self.module["value"](x)
        outputs = []
        s = state["s"]
        z = state["z"]
        parts = zip(*(each.split(CHUNK, 1) for each in (q, k, v)), strict=True)
        for q, k, v in parts:
            own = (q @ k.mT).tril()
            y = own @ v + q @ s
            if self.normalised:
                y = y / (own.sum(-1) + (q @ z[..., None])[..., 0])[..., None]
            s = s + k.mT @ v
            z = z + k.sum(1)
            outputs.append(y)
        return torch.cat(outputs, 1), {"s": s, "z": z}


@right("retention")
@right("retention in float64", dtype=torch.float64)
class Retention(Mixer):
    """All of a segment in parallel."""

    def layers(self) -> dict[str, nn.Module]:
        return {name: nn.Linear(WIDTH, WIDTH) for name in ("query", "key", "value", "gate")}

    def start(self, batch_size: int) -> State:
        return {"s": torch.zeros(batch_size, WIDTH, WIDTH, dtype=self.dtype)}

    def mix(self, x: Tensor, state: State) -> Read:
        q, k, v = (self.module[name](x) for name in ("query", "key", "value"))
        n = x.shape[1]
        decay = 0.9
        t = torch.arange(n)
        powers = torch.tensor(decay, dtype=torch.float64) ** (t[:, None] - t).clamp(min=0)
        within = (q @ k.mT) * powers.tril().to(x.dtype)
        before = (decay ** (t + 1.0).double()).to(x.dtype)[:, None] * (q @ state["s"])
        later = (decay ** (n - 1.0 - t).double()).to(x.dtype)[:, None]
        s = decay**n * state["s"] + (k * later).mT @ v
        y = within @ v + before
        return y * F.silu(self.module["gate"](x)) + x, {"s": s}


@right("diagonal state space by FFT")
@right("diagonal state space by FFT, float64", dtype=torch.float64)
class Diagonal(Mixer):
    """Many tokens by a convolution, single ones by the recurrence."""

    def layers(self) -> dict[str, nn.Module]:
        return {"write": nn.Linear(WIDTH, WIDTH), "read": nn.Linear(2 * WIDTH, WIDTH)}

    def start(self, batch_size: int) -> State:
        kind = torch.complex128 if self.dtype == torch.float64 else torch.complex64
        return {"h": torch.zeros(batch_size, WIDTH, dtype=kind)}

    def mix(self, x: Tensor, state: State) -> Read:
        u = self.module["write"](x)
        h = state["h"]
        angles = torch.linspace(0.1, 2, WIDTH, dtype=u.dtype)
        root = torch.polar(torch.full_like(angles, 0.95), angles)
        n = x.shape[1]
        if n == 1:
            h = root * h + u[:, 0]
            all_h = h[:, None]
        else:
            powers = root ** torch.arange(n)[:, None]
            mixed = torch.fft.fft(powers, 2 * n, 0) * torch.fft.fft(u, 2 * n, 1)
            all_h = torch.fft.ifft(mixed, dim=1)[:, :n] + powers * root * h[:, None]
            h = all_h[:, -1]
        y = self.module["read"](torch.cat([all_h.real, all_h.imag], -1))
        return y.tanh() + x, {"h": h}


@right("weighted averages with a running maximum, as RWKV's")
class Weighted(Mixer):
    def layers(self) -> dict[str, nn.Module]:
        return {name: nn.Linear(WIDTH, WIDTH) for name in ("key", "value", "gate")}

    def start(self, batch_size: int) -> State:
        zeros = torch.zeros(batch_size, WIDTH, dtype=self.dtype)
        return {"a": zeros, "b": zeros.clone(), "top": zeros - 1e38, "last": zeros.clone()}

    def reset(self, state: State, rows: Tensor) -> State:
        fresh = self.start(len(rows))
        return {n: torch.where(rows[:, None], fresh[n], v) for n, v in state.items()}

    def mix(self, x: Tensor, state: State) -> Read:
        a, b, top, last = (state[name] for name in ("a", "b", "top", "last"))
        shifted = torch.cat([last[:, None], x[:, :-1]], 1)
        k = self.module["key"](x + shifted) * 3
        v = self.module["value"](x - shifted)
        outputs = []
        for t in range(x.shape[1]):
            now = torch.maximum(top, k[:, t])
            old = (top - now).exp()
            new = (k[:, t] - now).exp()
            a = old * a + new * v[:, t]
            b = old * b + new
            top = now - 0.1
            outputs.append(a / b)
        y = torch.stack(outputs, 1) * self.module["gate"](x).sigmoid()
        return y + x, {"a": a, "b": b, "top": top, "last": x[:, -1]}


@right("gated delta rule, chunks by a loop")
class Delta(Mixer):
    def layers(self) -> dict[str, nn.Module]:
        names = ("query", "key", "value", "beta", "decay")
        return {name: nn.Linear(WIDTH, WIDTH) for name in names}

    def start(self, batch_size: int) -> State:
        return {"s": torch.zeros(batch_size, WIDTH, WIDTH, dtype=self.dtype)}

    def mix(self, x: Tensor, state: State) -> Read:
        q, k = (F.normalize(self.module[name](x), dim=-1) for name in ("query", "key"))
        v = self.module["value"](x)
        s = state["s"]
        outputs = []
        beta, decay = (self.module[name](x).sigmoid()[..., :1] for name in ("beta", "decay"))
        for t in range(x.shape[1]):
            s = s * decay[:, t, :, None]
            error = v[:, t] - (k[:, t, None] @ s)[:, 0]
            s = s + k[:, t, :, None] * (beta[:, t] * error)[:, None]
            outputs.append((q[:, t, None] @ s)[:, 0])
        return torch.stack(outputs, 1) + x, {"s": s}


# ----- Caches


RIGHT["rotary keys and values"] = Attention
RIGHT["a sliding window"] = Sliding
RIGHT["keys and values in float64"] = lambda: Attention(torch.float64)


@right("room for keys and values made in advance, written in place")
class Preallocated(Attention):
    claims = Claims(consumes_state=True)
    read_padded: Any = None
    read_packed: Any = None
    reset: Any = None
    truncate: Any = None
    room = 8192

    def start(self, batch_size: int) -> State:
        zeros = torch.zeros(batch_size, self.room, 2, WIDTH, dtype=self.dtype)
        return {"kv": zeros, "position": torch.zeros(batch_size, dtype=torch.long)}

    def mix(self, x: Tensor, state: State) -> Read:
        n = int(state["position"][0])
        position = state["position"][:, None] + torch.arange(x.shape[1])
        kv = state["kv"].detach() if not x.requires_grad else state["kv"].clone()
        k = turned(self.module["key"](x), position)
        kv[:, n : n + x.shape[1]] = torch.stack([k, self.module["value"](x)], 2)
        k, v = kv[:, : n + x.shape[1]].unbind(2)
        q = turned(self.module["query"](x), position)
        scores = (2 * q @ k.mT).masked_fill(~self.seen(x.shape[1], k.shape[1]), -1e4)
        y = self.module["out"](scores.softmax(-1) @ v) + x
        return y, {"kv": kv, "position": state["position"] + x.shape[1]}

    claims = Claims(consumes_state=True, carries_gradients=False)


@right("eight bits a key, each token with its own scale")
class EightBits(Attention):
    read_padded: Any = None
    claims = Claims(bounded=False)

    def attend(self, x: Tensor, state: State, real: Tensor) -> Read:
        position = self.positions(state, real)
        new = torch.cat([turned(self.module["key"](x), position), self.module["value"](x)], -1)
        scale = new.abs().amax(-1, keepdim=True) / 127
        new = (new / scale).round() * scale
        k, v = (torch.cat([state[n], y], 1) for n, y in zip("kv", new.chunk(2, -1), strict=True))
        q = turned(self.module["query"](x), position)
        valid = torch.cat([state["valid"], real], 1)
        scores = 4 * q @ k.mT / math.sqrt(WIDTH)
        seen = self.seen(x.shape[1], k.shape[1]) & valid[:, None]
        y = self.module["out"](scores.masked_fill(~seen, -1e4).softmax(-1) @ v) + x
        after = {"k": k, "v": v, "valid": valid, "position": state["position"] + real.sum(1)}
        return y, after


@right("a table of 48 positions")
class Learned(Attention):
    read_padded: Any = None
    claims = Claims(bounded=False, lengths={"table": 48})

    def layers(self) -> dict[str, nn.Module]:
        return super().layers() | {"places": nn.Embedding(48, WIDTH)}

    def mix(self, x: Tensor, state: State) -> Read:
        at = self.positions(state, torch.ones(x.shape[:2], dtype=torch.bool))
        return super().mix(x + self.module["places"](at), state)


# ----- Discontinuous ones


@right("spikes")
class Spiking(Gated):
    def mix(self, x: Tensor, state: State) -> Read:
        h = state["h"]
        outputs = []
        for t in range(x.shape[1]):
            h = 0.8 * h + self.module["cell"](x[:, t], torch.zeros_like(h))
            spikes = (h > 0.3).to(h.dtype)
            h = h - spikes * 0.3
            outputs.append(spikes)
        return torch.stack(outputs, 1), {"h": h}


@right("the best of four experts")
class Experts(Gated):
    def layers(self) -> dict[str, nn.Module]:
        experts = {f"expert{i}": nn.Linear(WIDTH, WIDTH) for i in range(4)}
        return super().layers() | experts | {"router": nn.Linear(WIDTH, 4)}

    def step(self, x: Tensor, h: Tensor, t: int) -> Tensor:
        h = super().step(x, h, t)
        best = self.module["router"](h).argmax(-1)
        every = torch.stack([self.module[f"expert{i}"](h) for i in range(4)], 1)
        return every[torch.arange(len(h)), best].tanh()


# ----- Outputs of other sizes


class Scaled(Gated):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def read(self, inputs: Tensor, state: State) -> Read:
        outputs, state = super().read(inputs, state)
        return self.change(outputs), state


def forbidden(y: Tensor) -> Tensor:
    return y.index_fill(2, torch.tensor([2, 5]), -torch.inf)


for text, change in {
    "logits times 1e6": lambda y: y * 1e6,
    "logits times 1e-8": lambda y: y * 1e-8,
    "logits plus 1000": lambda y: y + 1000,
    "log-softmax": lambda y: y.log_softmax(-1),
    "logits some of which are -inf": forbidden,
}.items():
    right(text, change)(Scaled)


@right("weights of 0.02")
class Faint(Gated):
    def __init__(self) -> None:
        super().__init__()
        for weight in self.module.parameters():
            nn.init.normal_(weight, 0, 0.02)


# ----- Vectors, frames, filters


def convolutions() -> Any:
    torch.manual_seed(0)
    net = nn.ModuleList([nn.Conv1d(6, 6, 3), nn.BatchNorm1d(6), nn.Conv1d(6, 6, 3)])
    norm: Any = net[1]
    with torch.no_grad():
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)

    def read(x: Tensor, state: Any) -> tuple[Tensor, Any]:
        first = torch.cat([state[0], x], 1)
        y = net[1](net[0](first.mT)).relu().mT
        second = torch.cat([state[1], y], 1)
        return net[2](second.mT).mT, (first[:, -2:], second[:, -2:])

    def start(rows: int) -> Any:
        return torch.zeros(rows, 2, 6), torch.zeros(rows, 2, 6)

    return Function(read, start, Inputs(width=6), net, Claims(moves_in_training=True))


def policy() -> Any:
    """Frames of 3 x 8 x 8, and what to do."""
    torch.manual_seed(1)
    net = nn.ModuleDict(
        {
            "see": nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.ReLU(), nn.Flatten()),
            "remember": nn.LSTM(36, 12, batch_first=True),
            "act": nn.Linear(12, 5),
        }
    )

    def read(x: Tensor, state: Any) -> tuple[Tensor, Any]:
        seen = net["see"](x.reshape(-1, 3, 8, 8)).view(*x.shape[:2], -1)
        y, state = net["remember"](seen, state)
        return net["act"](y), state

    def start(rows: int) -> Any:
        return torch.zeros(1, rows, 12), torch.zeros(1, rows, 12)

    return Function(read, start, Inputs(width=192), net, batch_dimension=1)


def filtered() -> Any:
    """A position and a speed, of which the position is seen."""
    step = torch.tensor([[1.0, 0.1], [0.0, 1.0]])
    noise = 0.01 * torch.eye(2)
    seen = torch.tensor([1.0, 0.0])

    def read(x: Tensor, state: Any) -> tuple[Tensor, Any]:
        mean, spread = state
        outputs = []
        for t in range(x.shape[1]):
            mean = mean @ step.T
            spread = step @ spread @ step.T + noise
            gain = (spread @ seen) / (spread @ seen @ seen + 0.1)[:, None]
            mean = mean + gain * (x[:, t] - mean @ seen[:, None])
            spread = spread - gain[:, :, None] * (spread @ seen)[:, None]
            outputs.append(mean)
        return torch.stack(outputs, 1), (mean, spread)

    def start(rows: int) -> Any:
        return torch.zeros(rows, 2), torch.eye(2).expand(rows, 2, 2).clone()

    return Function(read, start, Inputs(width=1))


def average() -> Any:
    """An exponential mean, by sums."""

    def read(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        powers = 0.9 ** torch.arange(1.0, x.shape[1] + 1)[:, None]
        y = powers * (state[:, None] + (0.1 * x / powers).cumsum(1))
        return y, y[:, -1]

    return Function(read, lambda rows: torch.zeros(rows, 4), Inputs(width=4))


@dataclass(slots=True)
class Slots:
    h: Tensor
    count: int = 0


def with_slots() -> Any:
    torch.manual_seed(2)
    cell = nn.GRUCell(4, 8)

    def read(x: Tensor, state: Slots) -> tuple[Tensor, Slots]:
        h = state.h
        outputs = []
        for t in range(x.shape[1]):
            h = cell(x[:, t], h)
            outputs.append(h)
        return torch.stack(outputs, 1), Slots(h, state.count + x.shape[1])

    return Function(read, lambda rows: Slots(torch.zeros(rows, 8)), Inputs(width=4), cell)


class Shared(nn.Module):
    """Decays that all channels share: a parameter that was expanded, as of one head for many."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Linear(4, 4)
        self.decay = nn.Parameter(torch.full((1,), 0.9).expand(4))

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for t in range(x.shape[1]):
            state = self.decay * state + self.layer(x[:, t])
            outputs.append(state)
        return torch.stack(outputs, 1), state


def shared() -> Any:
    module = Shared()
    return Function(module, lambda rows: torch.zeros(rows, 4), Inputs(width=4), module)


def aligned() -> Any:
    """Its state is of whole chunks: right where a text is cut at multiples of eight."""
    torch.manual_seed(3)
    net = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 8)])

    def read(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for part in x.split(8, 1):
            seen = net[0](part)
            outputs.append(seen + net[1](state)[:, None] + seen.cumsum(1))
            state = (net[1](state) + seen.mean(1)).tanh()
        return torch.cat(outputs, 1), state

    claims = Claims(cuts=8)
    return Function(read, lambda rows: torch.zeros(rows, 8), Inputs(width=4), net, claims)


def rnn(kind: type[nn.RNNBase], large: float = 1.0, **options: Any) -> Any:
    torch.manual_seed(4)
    module = kind(6, 8, **options)
    with torch.no_grad():
        for weight in module.parameters():
            weight *= large
    return Recurrent(module)


for text, make in {
    "convolutions with batch norm": convolutions,
    "frames to a policy": policy,
    "a Kalman filter": filtered,
    "an exponential mean": average,
    "a state with slots": with_slots,
    "a parameter that was expanded": shared,
    "cuts at multiples of a chunk": aligned,
    "LSTM": lambda: rnn(nn.LSTM, batch_first=True),
    "three layers of GRU": lambda: rnn(nn.GRU, num_layers=3),
    "RNN with large weights": lambda: rnn(nn.RNN, 3.0),
    "LSTM in float64": lambda: rnn(nn.LSTM, dtype=torch.float64),
}.items():
    RIGHT[text] = make

LOW["LSTM"] = lambda dtype: rnn(nn.LSTM, batch_first=True, dtype=dtype)
LOW["GRU"] = lambda dtype: rnn(nn.GRU, num_layers=2, dtype=dtype)
LOW["a cell"] = Gated
LOW["retention"] = Retention
LOW["keys and values"] = Attention
LOW["linear attention"] = lambda dtype: Linear(True, dtype=dtype)
LOW["a state space with a convolution"] = Convolved
LOW["RNN with large weights"] = lambda dtype: rnn(nn.RNN, 2.0, dtype=dtype)
LOW["a sliding window"] = Sliding
