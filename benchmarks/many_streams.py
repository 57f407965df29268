"""Many streams at once: tokens per second over all rows, and what it costs to change a row.

    python benchmarks/many_streams.py                       # about five minutes on one core
    python benchmarks/many_streams.py --architectures lstm --rows 16

A language model of 256 tokens, width 128 and 6 layers, with a memory of 64 slots (Compressive: and
64 compressed ones, one for four), reads one token per row and call. `read`: rows of the same age,
memory full. `write`: a continuation is written in each row, as `memspan.generate` does for as many
prompts. `serve`: a stream leaves after 16 tokens, its memory is saved, and another goes on from
its own, of 1 to 256 tokens; rows change at different times. `reset`, `replace` and `save`
(`reader.select`) of one row are given as a share of one read of all rows. CPU time on one
thread, median of interleaved rounds. Written: results/many-streams.json.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

import timing
from memspan.lab.data.tokenizers.plain import ByteTokenizer
from memspan.lab.generation.writer import Writer
from memspan.lab.runs.options import RunConfig
from memspan.lab.runs.run import Run
from memspan.memory import Memory
from memspan.models import LanguageModel
from memspan.models.registry import MODELS
from timing import interleaved

SIZE = {"n_layers": 6, "d_model": 128}
ATTENTION = {"n_heads": 4, "d_ff": 512}
SIZES = {
    "transformer-xl": SIZE | ATTENTION | {"memory_length": 64},
    "compressive": SIZE | ATTENTION | {"memory_length": 64, "compressed_length": 64},
    "feedback": SIZE | ATTENTION | {"memory_length": 64},
    "fast-weights": SIZE | ATTENTION,
    "gated-delta-net": SIZE | ATTENTION,
    "lstm": SIZE,
}
ROWS = (1, 16, 256)
TURN = 16
WAITING = 32


def text(rows: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(256, (rows, length), generator=torch.Generator().manual_seed(seed))


def full(model: LanguageModel, rows: int) -> Memory:
    """A memory with no room left: of all slots, compressed ones at four tokens each."""
    reader = model.reader(batch_size=rows)
    for segment in text(rows, 384).split(64, 1):
        reader.read(segment, targets=segment)
    return reader.memory


def waiting(model: LanguageModel) -> list[Memory]:
    """One stream each, after 1 to 256 tokens."""
    memories = []
    for n in range(WAITING):
        reader = model.reader()
        reader.read(text(1, 1 + 255 * n // (WAITING - 1), n))
        memories.append(reader.memory)
    return memories


def works(architecture: str, model: LanguageModel, rows: int) -> dict[str, Callable[[], object]]:
    """The measured calls, one each."""
    tokens = text(rows, 1)
    memory = full(model, rows)
    streams = waiting(model)
    options = RunConfig(model=model.backbone.config, architecture=architecture)
    run = Run(Path(), options, ByteTokenizer(), model, 0, {})
    writer = iter(Writer(run, [" "] * rows, tokens=10**9, memory=memory))
    readers = {name: model.reader(memory) for name in ("read", "serve", "reset", "replace", "save")}
    mask = torch.arange(rows) == rows // 2
    step = 0

    def serve() -> None:
        nonlocal step
        readers["serve"].read(tokens)
        # Rows whose turn ends now, at least one in TURN calls.
        if leaving := list(range(step % TURN, rows, TURN)):
            readers["serve"].select(leaving)
            # Always the same ones, so that the mixture of ages stays.
            coming = [streams[(step + n) % WAITING] for n in range(len(leaving))]
            readers["serve"].replace(leaving, joined(coming))
        step += 1

    return {
        "read": lambda: readers["read"].read(tokens),
        "write": lambda: next(writer),
        "serve": serve,
        "reset": lambda: readers["reset"].reset(mask),
        "replace": lambda: readers["replace"].replace([rows // 2], streams[-1]),
        "save": lambda: readers["save"].select([rows // 2]),
    }


def joined(memories: list[Memory]) -> Memory:
    each = [memory.tensors() for memory in memories]
    return type(memories[0])(**{name: torch.cat([t[name] for t in each]) for name in each[0]})


def measure(architecture: str, rows: int, rounds: int) -> dict[str, object]:
    torch.manual_seed(1)
    model = LanguageModel(256, MODELS[architecture](**SIZES[architecture])).eval()
    times = interleaved(works(architecture, model, rows), rounds)
    read = median(times["read"])
    serve = median(times["serve"])
    shares = {
        name: round(median(a / b for a, b in zip(times[name], times["read"], strict=True)), 3)
        for name in ("reset", "replace", "save")
    }
    return {
        "architecture": architecture,
        "rows": rows,
        "bytes_per_stream": model.initial_memory(1).nbytes,
        "tokens_per_second": round(rows / read, 1),
        "tokens_per_second_per_row": round(1 / read, 1),
        "writing_tokens_per_second": round(rows / median(times["write"]), 1),
        "serving_tokens_per_second": round(rows / serve, 1),
        **{f"{name}_of_a_read": share for name, share in shares.items()},
    }


def main() -> None:
    parser = timing.parser(__doc__, rounds=7, results="many-streams.json")
    parser.add_argument("--architectures", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS), metavar="N")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for architecture in options.architectures:
        for rows in options.rows:
            found.append(measure(architecture, rows, options.rounds))
            print(", ".join(f"{name} {value}" for name, value in found[-1].items()), flush=True)
    timing.write(options.json, found)


if __name__ == "__main__":
    main()
