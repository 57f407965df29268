"""The synthetic experiments of Schlag et al. 2021 (arXiv 2102.11174), section 6.1, with a plot each.

    python examples/retrieval.py capacity                      # minutes: keys of width 32
    python examples/retrieval.py updates
    python examples/retrieval.py capacity --width 64 --keys 100 200 600     # the authors' size

A sequence of key-value pairs is written into fast weights; then the value of one key is retrieved. Keys
and queries are learned, values are one-hot vectors. Loss: half the squared distance from the right
value, on held-out sequences, over all keys. As the authors do: Adam 1e-3, batches of 32, a test every
100 steps, stopping at a loss of 0.001 or after ten tests without progress; the best test counts. Rows
in the JSON file that were made with the same options stay in it.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memspan.ops import DPFP, delta_rule, elu_plus_one, favor, orthogonal_projection

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import plots
import timing

MODELS = {
    "capacity": ["softmax", "sum elu", "sum dpfp-1", "sum dpfp-2", "sum favor", "sum dpfp-3"],
    "updates": ["sum dpfp-1", "delta dpfp-1", "sum dpfp-2", "delta dpfp-2"],
}
LOOKS = {
    "softmax": ("transformer-xl", 0),
    "sum elu": ("transformer", 0),
    "sum favor": ("sliding-window", 0),
    "sum dpfp-1": ("compressive", 0),
    "sum dpfp-2": ("compressive", 2),
    "sum dpfp-3": ("compressive", 4),
    "delta dpfp-1": ("fast-weights", 0),
    "delta dpfp-2": ("fast-weights", 2),
}
"""Colours: slots, sums and the delta rule."""
KEYS = {
    "capacity": [24, 48, 64, 96, 128],
    "updates": [8, 16, 32, 48],
}
EPSILON = 1e-6


@dataclass(frozen=True)
class Batch:
    """Sequences of pairs, each with one query."""

    keys: Tensor
    """int64 ``[B, T]``, in ``0 .. n_keys - 1``."""
    values: Tensor
    """int64 ``[B, T]``, in the same range."""
    query: Tensor
    """The queried key, int64 ``[B]``."""
    answer: Tensor
    """The last value of that key, int64 ``[B]``."""


@dataclass(frozen=True)
class Retrieval:
    """Associative retrieval with ``n_keys`` keys, and as many values."""

    n_keys: int
    """Unique keys, the paper's S."""
    repeat: bool = False
    """Draw keys and values with repetition, for twice as many pairs."""

    @property
    def length(self) -> int:
        """Pairs of a sequence, T."""
        return self.n_keys * (2 if self.repeat else 1)

    def batch(self, batch_size: int, generator: torch.Generator) -> Batch:
        """Random sequences; each query is the key of a random pair."""
        keys, values = (self._draw(batch_size, generator) for _ in range(2))
        asked = torch.randint(self.length, (batch_size, 1), generator=generator)
        return self._with_answers(keys, values, keys.gather(1, asked)[:, 0])

    def every_query(self, generator: torch.Generator) -> Batch:
        """One random sequence, repeated to query each key in it."""
        keys, values = (self._draw(1, generator) for _ in range(2))
        query = keys.unique()
        rows = len(query)
        return self._with_answers(keys.expand(rows, -1), values.expand(rows, -1), query)

    def _draw(self, batch_size: int, generator: torch.Generator) -> Tensor:
        shape = (batch_size, self.length)
        if self.repeat:
            return torch.randint(self.n_keys, shape, generator=generator)
        return torch.rand(shape, generator=generator).argsort(1)

    def _with_answers(self, keys: Tensor, values: Tensor, query: Tensor) -> Batch:
        position = torch.arange(self.length)
        last = torch.where(keys == query[:, None], position, -1).argmax(1, keepdim=True)
        return Batch(keys, values, query, values.gather(1, last)[:, 0])


class Retriever(nn.Module):
    """One head that writes every pair and reads once: ``name`` is a rule and a feature map."""

    def __init__(self, name: str, n_keys: int, width: int, favor_features: int) -> None:
        super().__init__()
        self.rule, _, kind = name.partition(" ")
        self.kind, _, nu = kind.partition("-")
        self.nu = int(nu or 1)
        self.width = width
        self.n_keys = n_keys
        self.favor_features = favor_features
        embedded = int(2.2 * n_keys)
        self.embedding = nn.Embedding(n_keys, embedded)
        # A key may depend on its value too, as in the authors' code.
        self.key = nn.Linear(embedded + n_keys, width)
        self.query = nn.Linear(embedded, width)
        self.beta = nn.Linear(embedded + n_keys, 1)
        for layer in (self.key, self.query):
            nn.init.uniform_(layer.weight, -(width**-0.5), width**-0.5)

    def forward(self, batch: Batch) -> Tensor:
        """The value read, ``[B, n_keys]``. All queries may share one sequence."""
        values = F.one_hot(batch.values, self.n_keys).float()
        pairs = torch.cat([values, self.embedding(batch.keys)], -1)
        k = self.key(pairs)[:, None]
        q = self.query(self.embedding(batch.query))[:, None, None]
        v = values[:, None]
        if self.rule == "softmax":
            scores = q @ k.mT * self.width**-0.5
            return (scores.softmax(-1) @ v)[:, 0, 0]
        if self.rule == "delta":
            features = DPFP(self.nu, EPSILON)
            empty = k.new_zeros(len(values), 1, 2 * self.width * self.nu, self.n_keys)
            beta = self.beta(pairs)[..., 0].sigmoid()[:, None]
            _, memory = delta_rule(k, k, v, beta, empty, feature_map=features)
            return (features(q) @ memory)[:, 0, 0]
        features = self.feature_map()
        k = features(k)
        q = features(q)
        # Without a loop: only the last memory is needed.
        memory = k.mT @ v
        read = q @ memory / ((q * k.sum(2, keepdim=True)).sum(-1, keepdim=True) + EPSILON)
        return read[:, 0, 0]

    def feature_map(self):
        if self.kind == "favor":
            # Drawn anew for every batch.
            return partial(favor, projection=orthogonal_projection(self.width, self.favor_features))
        return elu_plus_one if self.kind == "elu" else DPFP(self.nu)


def loss_of(model: Retriever, batch: Batch) -> Tensor:
    target = F.one_hot(batch.answer, model.n_keys)
    return (model(batch) - target).square().sum(-1).mean() / 2


def once(batch: Batch) -> Batch:
    """The sequence, which is the same in all rows, as one row."""
    return replace(batch, keys=batch.keys[:1], values=batch.values[:1])


def train(
    name: str, task: Retrieval, width: int, favor_features: int, steps: int, seed: int
) -> dict[str, object]:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Retriever(name, task.n_keys, width, favor_features)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    best = float("inf")
    since = 0
    start = time.perf_counter()
    step = 0
    while step < steps and best > 0.001 and since <= 10:
        for _ in range(100):
            loss = loss_of(model, task.batch(32, generator))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        step += 100
        with torch.no_grad():
            tests = [loss_of(model, once(task.every_query(generator))).item() for _ in range(20)]
        loss = sum(tests) / len(tests)
        best, since = (loss, 0) if loss < best else (best, since + 1)
    seconds = time.perf_counter() - start
    row = {"model": name, "keys": task.n_keys, "loss": best, "steps": step, "seconds": seconds}
    print(
        f"{name:14} {task.n_keys:4} keys  loss {best:.4f}  {step} steps, {seconds:.0f} s",
        flush=True,
    )
    return row


def plot(rows: list[dict], setting: str, width: int, favor_features: int, path: Path) -> None:
    """Loss against the number of keys; dotted, a feature map's number of features."""
    figure, (axes,) = plots.panels(1, 3.4)
    for name in dict.fromkeys(row["model"] for row in rows):
        found = sorted((r["keys"], r["loss"]) for r in rows if r["model"] == name)
        style = plots.look(*LOOKS[name])
        label = f"{name}, {2 * favor_features}" if name == "sum favor" else name
        axes.plot(*zip(*found, strict=True), label=label, **style)
        if name.partition("-")[2]:
            limit = 2 * width * int(name.partition("-")[2])
            axes.axvline(limit, color=style["color"], linestyle=":", linewidth=1)
    axes.set_xlim(0, max(r["keys"] for r in rows) * 1.03)
    axes.set(xlabel=f"unique keys of width {width}", ylabel="retrieval loss")
    plots.name_lines(figure, axes)
    plots.save(figure, path)


def earlier(path: Path, shown: dict[str, int]) -> list[dict]:
    """Rows in the file that were made with the same options."""
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    return found["rows"] if found.get("options") == shown else []


def main() -> None:
    parser = timing.parser(__doc__)
    parser.add_argument("setting", choices=MODELS)
    parser.add_argument("--width", type=int, default=32, help="of keys before the feature map")
    parser.add_argument("--keys", type=int, nargs="+", help="numbers of unique keys")
    known = sorted({name for names in MODELS.values() for name in names})
    parser.add_argument(
        "--models", nargs="+", choices=known, metavar="NAME", help="only these models"
    )
    parser.add_argument("--favor-features", type=int, default=64, help="random projections")
    parser.add_argument("--steps", type=int, default=1000, help="at most, per model and size")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for JSON and plot")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"retrieval-{options.setting}.json"
    shown = {name: getattr(options, name) for name in ("width", "favor_features", "steps", "seed")}
    for name in options.models or MODELS[options.setting]:
        for n_keys in options.keys or KEYS[options.setting]:
            task = Retrieval(n_keys, repeat=options.setting == "updates")
            row = train(name, task, *shown.values())
            # One by one, so that an interruption loses little.
            rows = [r for r in earlier(path, shown) if (r["model"], r["keys"]) != (name, n_keys)]
            rows = sorted(
                [*rows, row], key=lambda r: (MODELS[options.setting].index(r["model"]), r["keys"])
            )
            path.write_text(json.dumps({"options": shown, "rows": rows}, indent=1) + "\n")
    image = path.with_suffix(".png")
    plot(earlier(path, shown), options.setting, options.width, options.favor_features, image)
    print(f"written: {path}, {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
