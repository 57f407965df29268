"""Measure the cost of options and ways of working, in time and memory.

    python benchmarks/costs.py recompute       # activation checkpointing, in each architecture
    python benchmarks/costs.py length          # a token of Fast Weights, in short texts and long ones
    python benchmarks/costs.py options         # dropout, post-norm and threads, in training Feedback
    python benchmarks/costs.py sliding         # evaluation with memory against a sliding window
    python benchmarks/costs.py remembering     # a token in memory: Feedback against Transformer-XL
    python benchmarks/costs.py hooks           # modules with hooks, which are called one by one

CPU time on one thread, sides taking turns, the median of the rounds; ratios are formed within a round.
Peaks are those of a process of its own, beyond the model. Each writes its rows to a file in results.

recompute: a segment forward and backward with memory and dropout 0.1: eight layers of width 128,
4 heads, feed-forward 512, 8 rows of 256 bytes, 256 slots of memory. Megabytes of tensors that live at
once at most, and of the process; gradients are included.

length: one row through one layer of width 128 with 4 heads, dpfp 1, feed-forward 512, forward and
backward, with everything saved for backward and with a part of it recomputed.

options: forward and backward at the size T64 of throughput.py, 4 layers of width 128, 16 rows. With
``--threads 1 2`` wall time, for which the machine must be idle. Ratios are to the first row.

sliding: to give every token the same left context, a transformer without memory reads its entire window
again for each token (Dai et al. 2019, table 9). Transformer-XL reads segments and carries its memory.
Both have 6 layers of width 256 and the same attention length, and read one row.

remembering: 4 layers of width 128, a full memory of 256 tokens, one row. Bytes are per token: in the
memory that is carried and saved, and in the keys and values that a reader stores beside it.

hooks: milliseconds of a token, a segment and an update, as made and with a hook on every product; 4
layers of width 128.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import timing
from memspan.lab.training.estimate import Tally
from memspan.models import (
    CompressiveConfig,
    FastWeightsConfig,
    Feedback,
    FeedbackConfig,
    LanguageModel,
    TransformerXLConfig,
)
from memspan.models.options import BackboneConfig
from memspan.models.registry import MODELS
from peak_memory import peak_of
from peers.gpt import GPT
from sides import its_own
from timing import interleaved, ratio

Row = dict[str, Any]
SMALL = {"n_layers": 4, "d_model": 128, "n_heads": 4, "d_ff": 512}


def checkpointed(architecture: str, recompute: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    kind = MODELS[architecture]
    sizes = its_own(kind, SMALL | {"n_layers": 8, "memory_length": 256})
    model = LanguageModel(256, kind(**sizes, dropout=0.1)).train()
    model.recompute = recompute
    tokens = torch.randint(256, (8, 256))
    with torch.no_grad():
        memory = model(tokens).memory

    def call() -> None:
        model.zero_grad()
        model(tokens, memory, targets=tokens).loss.backward()

    return call


def recompute(rounds: int) -> Iterator[Row]:
    for architecture in MODELS:
        row: Row = {"architecture": architecture}
        kinds = {"": False, "_recomputed": True}
        for name, on in kinds.items():
            call = checkpointed(architecture, on)
            with Tally() as counted:
                call()
            row[f"tensors{name}"] = counted.peak / 1e6
            row[f"process{name}"] = peak_of(checkpointed, architecture, on) / 1e6
        calls = {on: checkpointed(architecture, on) for on in kinds.values()}
        seconds = interleaved(calls, rounds)
        yield row | {"time": ratio(seconds[True], seconds[False]).middle}


def text_of(length: int, recompute: bool) -> Callable[[], None]:
    if length > 8:
        # The loop in C is loaded by the first call, which does not count.
        text_of(8, recompute)()
    torch.manual_seed(0)
    size = FastWeightsConfig(**SMALL | {"n_layers": 1}, recompute=recompute)
    backbone = LanguageModel(256, size).backbone
    x = torch.randn(1, length, 128)

    def call() -> None:
        backbone(x).hidden.square().mean().backward()

    return call


def length(
    rounds: int, lengths: Sequence[int] = (256, 1024, 4096, 16_384, 65_536)
) -> Iterator[Row]:
    for on in (False, True):
        for n, seconds in interleaved({n: text_of(n, on) for n in lengths}, rounds).items():
            yield {
                "tokens": n,
                "recompute": on,
                "microseconds_per_token": 1e6 * median(seconds) / n,
                "bytes_per_token": peak_of(text_of, n, on) / n,
            }


DROPOUT: Row = {"dropout": 0.1, "attention_dropout": 0.1}
OPTIONS: dict[str, Row] = {
    "pre-norm": {},
    "pre-norm, dropout": DROPOUT,
    "post-norm": {"normalisation": "post"},
    "post-norm, dropout": DROPOUT | {"normalisation": "post"},
}


def feedback_step(given: Row) -> Callable[[], None]:
    torch.manual_seed(0)
    model = Feedback(FeedbackConfig(**SMALL, memory_length=128, **given))
    x = torch.randn(16, 64, 128)

    def call() -> None:
        model(x).hidden.square().mean().backward()
        model.zero_grad(set_to_none=True)

    return call


@contextlib.contextmanager
def threads(key: tuple[str, int]) -> Iterator[None]:
    """In as many threads as the key of an option says."""
    before = torch.get_num_threads()
    torch.set_num_threads(key[1])
    yield
    torch.set_num_threads(before)


def options(rounds: int, threads_tried: Sequence[int] = (1,)) -> Iterator[Row]:
    calls = {
        (name, n): feedback_step(given) for n in threads_tried for name, given in OPTIONS.items()
    }
    clock = time.process_time if tuple(threads_tried) == (1,) else time.perf_counter
    times = interleaved(calls, rounds, within=threads, clock=clock)
    first = next(iter(times.values()))
    for (name, n), seconds in times.items():
        row = {"options": name, "threads": n, "milliseconds": round(1000 * median(seconds), 1)}
        yield row | ratio(seconds, first).row(3) | {"rounds": len(seconds)}


def sliding(rounds: int, lengths: Sequence[int] = (800, 1800, 2800, 3800)) -> Iterator[Row]:
    layers = 6
    width = 256
    cut = 128
    sizes = {"n_layers": layers, "d_model": width, "n_heads": 8, "d_ff": 4 * width}
    generator = torch.Generator().manual_seed(1)
    for n in lengths:
        config = TransformerXLConfig(**sizes, memory_length=n - cut)
        reader = LanguageModel(256, config).eval().reader(batch_size=1)
        plain = GPT(256, n, layers, 8, width, 4 * width).eval()
        text = torch.randint(256, (1, n), generator=generator)
        for segment in text.split(cut, 1):
            reader.read(segment)
        sides = {"sliding": partial(plain, text), "memory": partial(reader.read, text[:, :cut])}
        with torch.no_grad():
            times = interleaved(sides, rounds)
        # A call scores one token on one side and a segment on the other.
        per_token = [t / cut for t in times["memory"]]
        yield {"attention_length": n, **ratio(times["sliding"], per_token).row(1)} | {
            "sliding_tokens_per_second": round(1 / median(times["sliding"]), 2),
            "tokens_per_second": round(1 / median(per_token), 1),
        }


def remembering(rounds: int) -> Iterator[Row]:
    span = 256
    configs = {
        "feedback": FeedbackConfig(**SMALL, memory_length=span),
        "feedback per-layer": FeedbackConfig(**SMALL, memory_length=span, projections="per-layer"),
        "transformer-xl": TransformerXLConfig(**SMALL, memory_length=span, attention_span="fixed"),
    }
    models = {name: LanguageModel(256, config).eval() for name, config in configs.items()}
    readers = {name: model.reader() for name, model in models.items()}
    for reader in readers.values():
        reader.read(torch.randint(256, (1, span)))
    token = torch.randint(256, (1, 1))
    times = interleaved({name: partial(r.read, token) for name, r in readers.items()}, rounds)
    for name, config in configs.items():
        memory = models[name].initial_memory(1)
        vectors = memory.vectors if hasattr(memory, "vectors") else memory.hidden
        # Keys and values: of every layer, or one of each for all.
        width = 2 * config.n_heads * config.head_width * vectors.element_size()
        shared = getattr(config, "projections", "per-layer") == "shared"
        yield {
            "model": name,
            "parameters": sum(p.numel() for p in models[name].parameters()),
            "memory_bytes": vectors.nbytes // span,
            "key_and_value_bytes": width * (1 if shared else config.n_layers),
            "tokens_per_second": round(1 / median(times[name])),
        }


HOOKED: dict[str, BackboneConfig] = {
    "transformer-xl": TransformerXLConfig(**SMALL, memory_length=128),
    "compressive": CompressiveConfig(**SMALL, memory_length=64, compressed_length=64),
    "feedback": FeedbackConfig(**SMALL, memory_length=64),
    "fast-weights": FastWeightsConfig(**SMALL),
}


def works(config: BackboneConfig, hooked: bool) -> dict[str, Callable[[], object]]:
    """A token, a segment and an update."""
    torch.manual_seed(0)
    read = LanguageModel(256, config).eval()
    trained = LanguageModel(256, config)
    for model in (read, trained):
        for part in model.backbone.modules():
            if hooked and type(part) is nn.Linear:
                part.register_forward_hook(lambda *_: None)
    reader = read.reader()
    one, segment, rows = (torch.randint(256, size) for size in ((1, 1), (1, 128), (4, 64)))
    reader.read(segment)

    def update() -> None:
        trained(rows, targets=rows).loss.backward()
        trained.zero_grad()

    calls: dict[str, Callable[[], Tensor | None]] = {
        "token": lambda: reader.read(one),
        "segment of 128": lambda: reader.read(segment),
        "update of 4 x 64": update,
    }
    return calls


def hooks(rounds: int) -> Iterator[Row]:
    for name, config in HOOKED.items():
        made = works(config, False)
        hooked = works(config, True)
        for work in made:
            times = interleaved({"made": made[work], "hooked": hooked[work]}, rounds)
            found = {f"{side}_ms": round(1e3 * median(t), 3) for side, t in times.items()}
            slower = ratio(times["hooked"], times["made"]).row(1)
            yield {"model": name, "work": work} | found | slower


WORKS = {work.__name__: work for work in (recompute, length, options, sliding, remembering, hooks)}
FILES = {"length": "fast-weights-length", "options": "feedback-options"}


def main() -> None:
    parser = timing.parser(__doc__, rounds=7)
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("--lengths", type=int, nargs="+", metavar="T", help="of length, sliding")
    parser.add_argument("--threads", type=int, nargs="+", metavar="N", help="of options")
    parser.add_argument("--json", type=Path, help="default: in benchmarks/results")
    given = parser.parse_args()
    torch.set_num_threads(1)
    more = {"lengths": given.lengths, "threads_tried": given.threads}
    rows = []
    for row in WORKS[given.work](given.rounds, **{k: v for k, v in more.items() if v}):
        rows.append(row)
        print(row, flush=True)
    timing.write(given.json or timing.RESULTS / f"{FILES.get(given.work, given.work)}.json", rows)


if __name__ == "__main__":
    main()
