"""Measure recall over distance: every architecture on one task, with the edges that theory predicts.

    python examples/recall.py time                 # panel A: 100 CPU seconds of training each
    python examples/recall.py level                # panel B: until it is right within its reach
    python examples/recall.py keys                 # panel C: accuracy against the number of keys
    python examples/recall.py today                # panel D: the memories of today, 50 seconds each
    python examples/recall.py pictures             # draw what is there

The task is in `recall_task.py`; docs/recall.md explains it and the edges. All models
have about as many parameters, and the same optimiser, schedule and curriculum: distances are
log-uniform up to 16 at first, and up to 4,096 from the 500th update on. Each model's learning rate is
the best of three, tried with seed 0 before its first run, for 50 seconds each; in panel D the best of
two, for 25 seconds each. Time is the CPU
time of updates, one thread per run; drawing the task's tokens is not counted. In panel B a run ends
when 95 % of the last 10,000 questions about writes in direct reach were answered with p > ½, or at
the limit.

Scores are of 32 new streams, after as many tokens as the longest distance. Runs that are in the
JSON file are not repeated, so that the script can be stopped and started again.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memspan.models import LanguageModel
from recall_models import CONTESTANTS, PANELS, SEGMENT, Panel, in_reach, made
from recall_peers import Peer
from recall_pictures import pictures
from recall_task import Recall

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import timing
from trainings import make, rows_in

ROWS = 16
SHORTEST = 16
CURRICULUM = 500
"""The curriculum's first longest distance, and the number of updates in which that grows."""
LEVEL = 0.95
LAST_QUESTIONS = 10_000
TEST_ROWS = 32
TEST_SEED = 1_000_000


# ----- Training


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Train one model and score it."""
    # Trials of learning rates are on the task of the first panel.
    name = job["model"]
    panel = PANELS.get(job["panel"], PANELS["time"])
    seconds = job["seconds"]
    torch.manual_seed(job["seed"])
    vocab_size = panel.task.vocab_size
    model = made(name, vocab_size)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=job["rate"], betas=(0.9, 0.99), weight_decay=0.01, fused=True
    )
    live = [panel.live[row % len(panel.live)] for row in range(ROWS)]
    stream = panel.task.stream(ROWS, job["seed"], live)
    memory: Any = model.initial_memory(ROWS)
    last: deque[Tensor] = deque()
    clock = 0.0
    step = 0
    while clock < seconds:
        grown = min(1.0, step / CURRICULUM)
        longest = int(SHORTEST * (panel.task.longest / SHORTEST) ** grown)
        segment = stream.next(SEGMENT, longest)
        start = time.process_time()
        out = model(segment.tokens, memory, targets=segment.targets)
        memory = out.memory.detach()
        out.loss.backward()
        update(model, optimizer, job["rate"], step, clock / seconds)
        step += 1
        clock += time.process_time() - start
        full = job["panel"] == "level" and grown == 1
        if full and learned(name, segment.distances, out.losses, last):
            break
    found = score(model, name, panel)
    read = step * ROWS * SEGMENT
    parameters = sum(p.numel() for p in model.parameters())
    return {"cpu_seconds": round(clock, 1), "tokens": read, "parameters": parameters} | found


def update(
    model: Any, optimizer: torch.optim.Optimizer, rate: float, step: int, share: float
) -> None:
    """Clip gradients and take a step, after a ``share`` of the time. The learning rate is ``rate`` for
    half of it, after 50 steps that lead up to it, and then goes down to a twentieth."""
    for group in model.clip_groups():
        torch.nn.utils.clip_grad_norm_(group, 1.0)
    optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / 50, 2 * (1.025 - share))
    optimizer.step()
    optimizer.zero_grad()


def learned(name: str, distances: Tensor, losses: Tensor | None, last: deque[Tensor]) -> bool:
    """Tell if the last questions in reach, kept in ``last``, are answered well enough."""
    assert losses is not None
    asked = (distances > 0) & in_reach(name, distances, torch.arange(SEGMENT))
    last.append(losses.detach()[asked] < math.log(2))
    while sum(map(len, last)) - len(last[0]) >= LAST_QUESTIONS:
        last.popleft()
    right = torch.cat(list(last))
    return len(right) >= LAST_QUESTIONS and right.float().mean().item() >= LEVEL


@torch.no_grad()
def score(model: LanguageModel | Peer, name: str, panel: Panel) -> dict[str, Any]:
    """Accuracy by distance, or by the number of live keys where that varies; and within reach."""
    model.eval()
    curve = []
    within = []
    for live in panel.live:
        distances, places, right = answers(model, panel.task, live)
        within.append(right[in_reach(name, distances, places)])
        if not panel.over_distance:
            low, high = panel.distances
            there = (low <= distances) & (distances <= high)
            curve.append((live, right[there].mean().item()))
            continue
        half_octave = (2 * distances.double().log2()).floor().int()
        for i in half_octave.unique().tolist():
            here = half_octave == i
            middle = distances[here].double().log2().mean().exp2().item()
            curve.append((round(middle, 1), right[here].mean().item()))
    curve = [(at, round(accuracy, 4)) for at, accuracy in curve]
    return {"level": round(torch.cat(within).mean().item(), 4), "curve": curve}


def answers(model: LanguageModel | Peer, task: Recall, live: int) -> tuple[Tensor, Tensor, Tensor]:
    """Distance, place in the segment, and 1.0 where the answer is right, of all questions."""
    stream = task.stream(TEST_ROWS, TEST_SEED, live)
    memory: Any = None
    found = []
    for first in range(0, 2 * task.longest, SEGMENT):
        segment = stream.next(SEGMENT)
        out = model(segment.tokens, memory)
        memory = out.memory
        if first < task.longest:
            continue
        assert out.logits is not None
        asked = segment.distances > 0
        right = out.logits.argmax(-1) == segment.targets
        places = torch.arange(SEGMENT).expand_as(asked)
        found.append((segment.distances[asked], places[asked], right[asked].float()))
    distances, places, right = (torch.cat(part) for part in zip(*found, strict=True))
    return distances, places, right


# ----- Runs


def trials(names: list[str], panel: Panel) -> list[dict[str, Any]]:
    same = {"panel": panel.trials, "seed": 0, "seconds": panel.trial}
    return [same | {"model": name, "rate": rate} for name in names for rate in panel.rates]


def best_rate(name: str, panel: Panel, path: Path) -> float:
    """The trial with the best accuracy, all distances alike."""
    tried = [r for r in rows_in(path) if (r["panel"], r["model"]) == (panel.trials, name)]
    best = max(tried, key=lambda row: sum(accuracy for _, accuracy in row["curve"]))
    return float(best["rate"])


def main() -> None:
    parser = timing.parser(__doc__)
    parser.add_argument("panel", choices=[*PANELS, "pictures"])
    parser.add_argument("--models", nargs="+", choices=CONTESTANTS, metavar="MODEL")
    parser.add_argument("--seconds", type=float, help="CPU time of a run (default: 100, today 50)")
    parser.add_argument("--limit", type=float, default=1800, help="the same in panel B")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--workers", type=int, default=2, help="runs at once, a core each")
    parser.add_argument("--out", type=Path, default=Path("recall"), help="folder for results")
    options = parser.parse_args()
    path = options.out / "recall.json"
    if options.panel != "pictures":
        panel = PANELS[options.panel]
        names = options.models or list(panel.models)
        make(trials(names, panel), train, path, options.workers)
        job: dict[str, Any] = {"panel": options.panel, "seconds": options.seconds or panel.seconds}
        if options.panel == "level":
            job["seconds"] = options.limit
        rates = {name: best_rate(name, panel, path) for name in names}
        jobs = [
            job | {"model": name, "seed": seed, "rate": rates[name]}
            for seed in options.seeds
            for name in names
        ]
        make(jobs, train, path, options.workers)
    shown = options.models or CONTESTANTS
    pictures([row for row in rows_in(path) if row["model"] in shown], options.out)


if __name__ == "__main__":
    main()
