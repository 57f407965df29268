"""Measure what a state can follow and what it can hold, in three tasks of short sequences.

    python examples/synthetic.py parity     # bits, and at each whether the ones so far are odd
    python examples/synthetic.py s3         # permutations of three things, and at each their product
    python examples/synthetic.py mqar       # keys and values, then questions (Zoology's protocol)
    python examples/synthetic.py table      # what was measured
    python examples/synthetic.py pictures   # the same, drawn

Models are those of `recall_models.py`: two layers of width 64, all with as many parameters. Each
sequence begins with an empty memory. The learning rate is the better of two, tried with seed 0; time is
the CPU time of updates, one thread per run. parity and s3 are trained on 32 tokens and scored on 256,
read in segments of 32 with the memory carried, as in Grazzi et al. 2024 (arXiv 2411.12537) and Siems et
al. 2025 (arXiv 2502.10297) at a smaller size. mqar is multi-query associative recall by Arora et al.
2023 (arXiv 2312.04927): keys with a value each, then each key once among random tokens, its gap to the
writes by a power law. Of its sizes the smallest, 64 tokens, with 8 keys; and, so that a CPU learns the
tables in a minute, 64 words in place of 8,192.

Runs that are in the JSON file are not repeated, so that the script can be stopped and started again.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from recall import update
from recall_models import CONTESTANTS, TODAY, made
from synthetic_pictures import pictures

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import timing
from page_tables import markdown
from trainings import grouped, make, rows_in

ROWS = 16
TEST_ROWS = 256
TEST_SEED = 1_000_000
RATES = (2e-3, 6e-3)
NOT_SCORED = -100
"""The target of a token that is not scored."""
WORDS = 64
PAIRS = 8
POWER = 0.01
"""Words of mqar, keys of a sequence, and the power of their gaps: the probability of a gap ``n`` is as
``n^(0.01 - 1)``."""
PERMUTATIONS = tuple(itertools.permutations(range(3)))


# ----- Tasks


def parity(rows: int, n_tokens: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens and targets ``[rows, n_tokens]``: bits; 2 if their sum so far is even, else 3."""
    bits = torch.randint(2, (rows, n_tokens), generator=random)
    return bits, 2 + bits.cumsum(1) % 2


def s3(rows: int, n_tokens: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens and targets ``[rows, n_tokens]``: permutations 0 to 5; 6 plus their product so far, in
    which each is applied after those before it."""
    words = torch.randint(6, (rows, n_tokens), generator=random)
    products = torch.tensor(
        [
            [PERMUTATIONS.index(tuple(after[i] for i in before)) for after in PERMUTATIONS]
            for before in PERMUTATIONS
        ]
    )
    product = torch.zeros(rows, dtype=torch.int64)
    targets = []
    for word in words.unbind(1):
        product = products[product, word]
        targets.append(6 + product)
    return words, torch.stack(targets, 1)


def mqar(rows: int, n_tokens: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens and targets ``[rows, n_tokens]``: keys 1 to 31, each followed by its value, 32 to 63;
    then each key again among random tokens, where its value is the target."""
    keys = 1 + torch.rand(rows, WORDS // 2 - 1, generator=random).argsort(1)[:, :PAIRS]
    values = WORDS // 2 + torch.rand(rows, WORDS // 2, generator=random).argsort(1)[:, :PAIRS]
    tokens = torch.randint(WORDS, (rows, n_tokens), generator=random)
    tokens[:, : 2 * PAIRS] = torch.stack([keys, values], 2).flatten(1)
    # Places without repetition: the largest of their logarithms with Gumbel's noise.
    places = torch.arange(1, (n_tokens - 2 * PAIRS) // 2 + 1)
    noise = torch.rand(rows, len(places), generator=random).log().neg().log()
    score = (POWER - 1) * places.log() - noise
    at = 2 * PAIRS + 2 * score.topk(PAIRS, 1).indices
    tokens.scatter_(1, at, keys)
    targets = torch.full_like(tokens, NOT_SCORED).scatter_(1, at, values)
    return tokens, targets


@dataclass(frozen=True)
class Task:
    """A task, its sizes, and who takes it."""

    draw: Callable[[int, int, torch.Generator], tuple[Tensor, Tensor]]
    vocab_size: int
    length: int
    """Tokens of a sequence in training, and of a segment in scoring."""
    longest: int
    """Tokens of a sequence in scoring."""
    seconds: float
    """CPU time of a run."""
    trial: float
    """CPU time of a trial."""
    models: tuple[str, ...]


_FOLLOWERS = (
    "memspan-mamba-2", "gla", "gated-delta-net", "gated-delta-net-negative", "kda", "delta-product",
    "rwkv-7", "fast-weights-delta", "feedback", "transformer-xl", "lstm", "transformer",
)  # fmt: skip
TASKS = {
    "parity": Task(parity, 4, 32, 256, 20, 10, _FOLLOWERS),
    "s3": Task(s3, 12, 32, 256, 20, 10, _FOLLOWERS),
    "mqar": Task(
        # As long as a run: in half of that most models still guess.
        mqar, WORDS, 64, 64, 40, 40,
        (*TODAY, "gated-delta-net", "fast-weights-delta", "feedback", "transformer-xl", "lstm"),
    ),
}  # fmt: skip


# ----- Training


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Train one model and score it."""
    task = TASKS[job["task"]]
    seconds = job["seconds"]
    torch.manual_seed(job["seed"])
    model: Any = made(job["model"], task.vocab_size)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=job["rate"], betas=(0.9, 0.99), weight_decay=0.01, fused=True
    )
    random = torch.Generator().manual_seed(job["seed"])
    clock = 0.0
    step = 0
    while clock < seconds:
        tokens, targets = task.draw(ROWS, task.length, random)
        start = time.process_time()
        model(tokens, targets=targets).loss.backward()
        update(model, optimizer, job["rate"], step, clock / seconds)
        step += 1
        clock += time.process_time() - start
    return {"cpu_seconds": round(clock, 1), "updates": step, "right": score(model, task)}


@torch.no_grad()
def score(model: Any, task: Task) -> dict[str, float]:
    """Share of right answers by position: up to ``length``, and from there in octaves."""
    model.eval()
    tokens, targets = task.draw(TEST_ROWS, task.longest, torch.Generator().manual_seed(TEST_SEED))
    memory = None
    right = []
    for segment in tokens.split(task.length, 1):
        output = model(segment, memory)
        memory = output.memory
        right.append(output.logits.argmax(-1))
    same = (torch.cat(right, 1) == targets).double()
    asked = targets != NOT_SCORED
    found = {}
    first = 0
    last = task.length
    while first < task.longest:
        here = asked[:, first:last]
        found[str(last)] = round(same[:, first:last][here].mean().item(), 4)
        first = last
        last *= 2
    return found


# ----- Runs


def best_rate(task: str, name: str, path: Path) -> float:
    """The trial with the most right answers, all lengths alike."""
    wanted = {"task": task, "model": name, "seed": 0, "seconds": TASKS[task].trial}
    tried = [row for row in rows_in(path) if wanted.items() <= row.items()]
    return float(max(tried, key=lambda row: fmean(row["right"].values()))["rate"])


def table(path: Path, task: str) -> str:
    """Means over seeds, and their least and most, of each model."""
    rows = [row for row in rows_in(path) if row["task"] == task and row["seed"]]
    lines = []
    for (name,), found in grouped(rows, "model").items():
        shares = {at: [100 * row["right"][at] for row in found] for at in found[0]["right"]}
        cells = [f"{fmean(v):.0f} ({min(v):.0f} to {max(v):.0f})" for v in shares.values()]
        updates = fmean(row["updates"] for row in found)
        lines.append(
            (
                fmean(map(fmean, shares.values())),
                [CONTESTANTS[name].label, *cells, f"{updates:,.0f}"],
            )
        )
    if not lines:
        return f"{task}: not measured"
    heads = [f"right at {at}, %" for at in found[0]["right"]]
    ordered = [cells for _, cells in sorted(lines, key=lambda line: -line[0])]
    return markdown([[task, *heads, "updates"], *ordered])


def main() -> None:
    parser = timing.parser(__doc__)
    parser.add_argument("task", choices=[*TASKS, "table", "pictures"])
    parser.add_argument("--models", nargs="+", choices=CONTESTANTS, metavar="MODEL")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--workers", type=int, default=2, help="runs at once, a core each")
    parser.add_argument("--out", type=Path, default=Path("recall"), help="folder for results")
    options = parser.parse_args()
    path = options.out / "synthetic.json"
    if options.task == "table":
        print("\n\n".join(table(path, task) for task in TASKS))
        return
    if options.task == "pictures":
        runs = [row for row in rows_in(path) if row["seed"]]
        pictures(runs, options.out, PAIRS, WORDS // 2)
        return
    task = TASKS[options.task]
    names = options.models or task.models
    job: dict[str, Any] = {"task": options.task}
    tried = [
        job | {"model": name, "seed": 0, "rate": rate, "seconds": task.trial}
        for name in names
        for rate in RATES
    ]
    make(tried, train, path, options.workers)
    jobs = [
        job
        | {"model": name, "seed": seed, "seconds": task.seconds}
        | {"rate": best_rate(options.task, name, path)}
        for seed in options.seeds
        for name in names
    ]
    make(jobs, train, path, options.workers)
    print(table(path, options.task))


if __name__ == "__main__":
    main()
