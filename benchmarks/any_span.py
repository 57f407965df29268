"""Measure the spans of models of transformers and of the runs that come with memspan.

    python benchmarks/any_span.py --work models     # trains, measures, writes the page and its picture
    python benchmarks/any_span.py --page            # writes both from what was measured

Needs the extra transformers. Four small models are trained on the bytes of the first nine tenths of
Tiny Shakespeare, each in about three CPU minutes on one thread; those that ``--work`` has are kept. All
are measured on the last tenth, 60 CPU seconds each, and compared on the targets that all were measured
with, after the longest history.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import memspan
import page_tables
import plots
from memspan.lab.measurement.measure import Measurement
from memspan.lab.runs.folder import SHIPPED
from shakespeare import add_text, parts
from timing import RESULTS, write
from timing import parser as parser_of

PAGE = page_tables.DOCS / "any-span.md"
TEXT = "tiny-shakespeare-held-out"
LONGEST = 1024
BUDGET = 60.0
LENGTH = 256
ROWS = 4
LEARNING_RATE = 3e-3
WARMUP = 100
"""Bytes of a row and rows of an update; the windows of the models that have one are as long."""
SHARED: dict[str, Any] = {
    "vocab_size": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    # About width ** -0.5: from the usual 0.02 such narrow models begin to learn late.
    "initializer_range": 0.1,
}
ATTENTION: dict[str, Any] = {
    **SHARED,
    "hidden_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": True,
}


MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "gpt2": (
        2300,
        SHARED
        | {"n_layer": 4, "n_embd": 80, "n_head": 4, "n_positions": LENGTH}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    ),
    "llama": (2600, ATTENTION | {"intermediate_size": 216}),
    # Heads and chunks in sizes that its reference implementation, which CPUs use, is fast at.
    "mamba2": (
        1300,
        SHARED
        | {"hidden_size": 104, "num_hidden_layers": 4, "num_heads": 4, "head_dim": 52}
        | {"state_size": 32, "n_groups": 1, "chunk_size": 16, "tie_word_embeddings": True},
    ),
    # Three layers of the gated delta rule and one of attention, without experts.
    "qwen3_next": (
        1200,
        ATTENTION
        | {"intermediate_size": 200, "num_key_value_heads": 2, "head_dim": 20}
        | {"linear_key_head_dim": 20, "linear_value_head_dim": 20}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        | {"num_experts": 0, "mlp_only_layers": [0, 1, 2, 3]},
    ),
}
"""Updates that take each type of model about three CPU minutes, and its options."""
LOOKS: dict[str, tuple[str, int]] = {
    "shakespeare": ("transformer-xl", 0),
    "shakespeare-compressive": ("compressive", 0),
    "shakespeare-feedback": ("feedback", 0),
    "shakespeare-fast-weights": ("fast-weights", 0),
    "shakespeare-gated-delta-net": ("gated-delta-net", 0),
    "gpt2": ("transformer", 0),
    "llama": ("sliding-window", 0),
    "mamba2": ("mamba-2", 0),
    "qwen3_next": ("gated-delta-net", 3),
}
"""Architecture whose colour each has, and the number of its variant."""


def train(name: str, text: Path, folder: Path) -> None:
    """Train a model from rows at random places of the text, and save it."""
    import transformers

    steps, options = MODELS[name]
    config = transformers.AutoConfig.for_model(name, **options)
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    tokens = torch.from_numpy(parts(text)[0].copy()).long()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimiser = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        betas=(0.9, 0.99),
    )
    start = time.process_time()
    for step in range(steps):
        rate = min((step + 1) / WARMUP, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        for group in optimiser.param_groups:
            group["lr"] = LEARNING_RATE * rate
        first = torch.randint(len(tokens) - LENGTH, (ROWS, 1))
        rows = tokens[first + torch.arange(LENGTH + 1)]
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step % 100 == 0:
            print(f"{name} {step}/{steps} {loss.item():.3f} {time.process_time() - start:.0f} s")
    model.config.trained = {
        "steps": steps,
        "bytes": steps * ROWS * LENGTH,
        "cpu_seconds": round(time.process_time() - start, 1),
    }
    model.save_pretrained(folder)


def rows(measurements: list[Measurement]) -> list[dict[str, Any]]:
    """Rows of the table, one per model; all losses are of the same targets."""
    spans = [m.span for m in measurements if m.span is not None]
    shared = sorted(set.intersection(*(set(span.first.tolist()) for span in spans)))
    found = []
    for m, span in zip(measurements, spans, strict=True):
        place = {int(first): i for i, first in enumerate(span.first)}
        nats = span.losses[[place[first] for first in shared]].mean((0, 1))
        bits = dict(zip([p.history for p in span.points], nats / np.log(2), strict=True))
        config = Path(m.run) / "config.json"
        trained = json.loads(config.read_text())["trained"] if config.is_file() else {}
        found.append(
            {
                "model": Path(m.run).name,
                "parameters": m.parameters,
                "window": m.window,
                "span": [span.tokens, span.low, span.high],
                "beyond": span.beyond,
                "blocks": span.blocks,
                "targets": len(shared) * span.losses.shape[1],
                "bits_per_byte": {str(n): round(float(b), 4) for n, b in bits.items()},
                "state_bytes": m.state_bytes,
                "cpu_seconds": m.seconds,
                "trained": trained,
            }
        )
    return found


def tables() -> dict[str, str]:
    """Tables for docs/any-span.md."""
    results = json.loads((RESULTS / "any-span.json").read_text())
    head = "model | parameters | trained on | span, tokens | blocks | bits per byte | "
    head += "bytes of state | per token of span | tokens per KiB"
    lines = [head.split(" | ")]
    for row in results["rows"]:
        span, low, high = row["span"]
        trained = row["trained"].get("bytes", 0)
        lines.append(
            [
                row["model"],
                f"{row['parameters']:,}",
                f"{trained / 1e6:.1f} MB" if trained else "",
                f"{'at least ' * row['beyond']}{span:,} [{low:,}, {high:,}]",
                f"{row['blocks']}",
                f"{row['bits_per_byte'][str(LONGEST)]:.3f}",
                f"{row['state_bytes']:,}",
                f"{row['state_bytes'] / span:,.0f}",
                f"{1024 * span / row['state_bytes']:.2f}",
            ]
        )
    where = results["machine"]
    last = f"One thread of an {where['cpu']}, {where['capability']}, {where['date']}; "
    last += f"bits per byte of {results['rows'][0]['targets']:,} targets."
    return {"models": f"{page_tables.markdown(lines)}\n\n{last}"}


def plot() -> None:
    """Loss against history, and span against bytes of state."""
    figure, (losses, states) = plots.panels(2, 3)
    for row in json.loads((RESULTS / "any-span.json").read_text())["rows"]:
        style = plots.look(*LOOKS[row["model"]])
        history, bits = zip(*row["bits_per_byte"].items(), strict=True)
        losses.plot([int(n) for n in history], bits, label=row["model"], **style)
        span, low, high = row["span"]
        x = row["state_bytes"] / 1024
        around = [[span - low], [high - span]]
        states.errorbar(
            x, span, around, fmt=style["marker"], color=style["color"], markersize=7, capsize=3
        )
    losses.set_xscale("log", base=2)
    losses.xaxis.set_major_formatter("{x:.0f}")
    losses.set(xlabel="tokens of history", ylabel="bits per byte", ylim=(2.3, 3.5))
    states.set_xscale("log", base=2)
    states.set_yscale("log", base=2)
    states.xaxis.set_major_formatter("{x:.0f}")
    states.yaxis.set_major_formatter("{x:.0f}")
    states.set(xlabel="KiB of state", ylabel="span, tokens")
    plots.name_lines(figure, losses)
    plots.save(figure, RESULTS / "any-span.png")


def main() -> None:
    parser = parser_of(__doc__)
    add_text(parser)
    parser.add_argument("--work", type=Path, help="folder of the trained models")
    parser.add_argument("--page", action="store_true", help="write the page from the results only")
    arguments = parser.parse_args()
    if not arguments.page:
        if arguments.work is None:
            parser.error("say where the trained models are, or will be: --work FOLDER")
        torch.set_num_threads(1)
        targets = list(SHIPPED)
        for name in MODELS:
            folder = arguments.work / name
            targets.append(str(folder))
            if not (folder / "config.json").is_file():
                train(name, arguments.text, folder)
        options: dict[str, Any] = {"longest": LONGEST, "budget": BUDGET, "device": "cpu"}
        found = [memspan.measure(target, TEXT, **options) for target in targets]
        write(RESULTS / "any-span.json", rows(found))
    page_tables.write(PAGE, tables())
    plot()


if __name__ == "__main__":
    main()
