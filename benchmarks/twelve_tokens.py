"""Pictures of twelve tokens that go through every architecture, for docs/path.md.

    python benchmarks/twelve_tokens.py        # writes docs/path/NAME.svg

Three segments of four tokens are read by small models with random weights: T = 4, M = 4, C = 2, c = 2.
Which tokens a slot of memory holds is found by trying: exchange one token for another, and see what
changes. Of a matrix it is how much of that change is left, in percent of what it was at first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memspan.models import (
    BackboneConfig,
    CompressiveConfig,
    FastWeightsConfig,
    FeedbackConfig,
    GatedDeltaNetConfig,
    TransformerXLConfig,
)

sys.path.append(str(Path(__file__).resolve().parents[1] / "docs"))
from docsite import colours

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "path"
TOKENS = "abcdefghijkl"
SEGMENT = 4
MEMORY = 4
COMPRESSED = 2
RATE = 2
"""T, M, C and c."""
SIZES = {"n_layers": 2, "d_model": 16, "n_heads": 4, "d_ff": 32}
MODELS: dict[str, BackboneConfig] = {
    "transformer-xl": TransformerXLConfig(**SIZES, memory_length=MEMORY),
    "compressive": CompressiveConfig(
        **SIZES, memory_length=MEMORY, compressed_length=COMPRESSED, compression_rate=RATE
    ),
    "feedback": FeedbackConfig(**SIZES, memory_length=MEMORY),
    "sum": FastWeightsConfig(**SIZES, rule="sum"),
    "delta": FastWeightsConfig(**SIZES),
    # Without the short convolutions, in which a token has a part in its neighbours' writes.
    "gated-delta": GatedDeltaNetConfig(**SIZES, convolution=1),
}
Slots = list[str]
"""For each slot, the tokens that it depends on; none: an empty slot."""


@torch.no_grad()
def memories(name: str, step: int = SEGMENT) -> Iterator[Any]:
    """The memory after every ``step`` tokens; in row ``i + 1`` of it, token ``i`` was another one."""
    torch.manual_seed(3)
    model = MODELS[name].build().double().eval()
    tokens, others = torch.randn(2, len(TOKENS), SIZES["d_model"], dtype=torch.float64)
    rows = tokens.repeat(1 + len(TOKENS), 1, 1)
    for i, other in enumerate(others):
        rows[i + 1, i] = other
    memory = model.initial_memory(len(rows))
    for part in rows.split(step, dim=1):
        memory = model(part, memory).memory
        yield memory


def held(slots: Tensor) -> Slots:
    """Find the tokens on which each of the slots ``[B, slots, ...]`` depends."""
    changes = (slots[1:] - slots[:1]).flatten(2).norm(dim=2)
    return ["".join(c for c, x in zip(TOKENS, slot, strict=True) if x > 1e-9) for slot in changes.T]


def slots_of(name: str, kind: str, layer: int | None = None) -> list[Slots]:
    """Slots of memory before each segment and after the last."""
    read = [getattr(memory, kind) for memory in memories(name)]
    after = [held(slots if layer is None else slots[:, layer]) for slots in read]
    return [[""] * len(after[0]), *after]


def left(name: str) -> list[list[int]]:
    """Percentage of each token's write left in the first matrix after each segment."""
    matrices = [memory.weights[:, 0, 0] for memory in memories(name, step=1)]
    sizes = torch.stack([(m[1:] - m[0]).flatten(1).norm(dim=1) for m in matrices])
    shares = 100 * sizes / sizes.diagonal()
    return [
        shares[t, : t + 1].round().int().tolist() for t in range(SEGMENT - 1, len(TOKENS), SEGMENT)
    ]


@torch.no_grad()
def decays(name: str) -> list[int]:
    """Share of the same matrix that each token leaves before it writes, in percent."""
    torch.manual_seed(3)
    model: Any = MODELS[name].build().double().eval()
    mixer = next(model.stack()).mixer
    steps = []
    mixer.step.register_forward_hook(lambda *arguments: steps.append(arguments[-1][0, :, 0]))
    model(torch.randn(2, len(TOKENS), SIZES["d_model"], dtype=torch.float64)[:1])
    rates = mixer.A_log[0].exp() * F.softplus(steps[0] + mixer.dt_bias[0])
    return (100 * (-rates).exp()).round().int().tolist()


WIDTH = 340
EDGE = 8
STYLE = """.card{fill:var(--paper);stroke:var(--line)}
text{font:12px -apple-system,'Segoe UI',Helvetica,Arial,'DejaVu Sans',sans-serif;fill:var(--ink)}
.c{text-anchor:middle}.t{font-size:14px}.s{fill:var(--soft)}
.segment{fill:var(--segment-fill);stroke:var(--segment)}.memory{fill:var(--memory-fill);stroke:var(--memory)}
.compressed{fill:var(--compressed-fill);stroke:var(--compressed)}
.feedback{fill:var(--feedback-fill);stroke:var(--feedback)}
.matrix{fill:var(--matrix-fill)}.frame{fill:none;stroke:var(--matrix)}
.empty{fill:none;stroke:var(--faint);stroke-dasharray:3 3}
"""


def _text(kind: str, x: float, y: float, words: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{words}</text>'


def _box(kind: str, x: float, y: float, words: str, width: float = 28) -> list[str]:
    box = f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="28" rx="4"/>'
    size = "c t" if len(words) < 3 else "c"
    return [box, _text(size, x + width / 2, y + 19, words)] if words else [box]


def _few(tokens: str) -> str:
    return tokens if len(tokens) < 3 else f"{tokens[0]}\N{EN DASH}{tokens[-1]}"


def _picture(title: str, description: str, height: float, parts: list[str]) -> str:
    body = "\n".join(parts)
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
        f'width="{1.3 * WIDTH:g}" height="{1.3 * height:g}" role="img" aria-labelledby="title desc">\n'
        f'<title id="title">{title}</title>\n<desc id="desc">{description}</desc>\n'
        f"<style>\n{colours.block(set())}{STYLE}</style>\n"
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:g}" rx="8"/>\n'
        f"{body}\n</svg>\n"
    )
    return colours.coloured(svg)


def of_slots(title: str, groups: list[tuple[str, str, list[list[Slots]]]]) -> str:
    """The keys that there are for each segment, oldest on the left.

    Args:
        title: of the picture.
        groups: of slots: their class, their name, and by layer, from the first, their tokens before
            each segment and after the last.
    """
    parts = []
    told = []
    y = 30.0
    begin: dict[str, float] = {}
    x = WIDTH - EDGE - 31.0 * (SEGMENT + sum(len(layers[0][0]) for _, _, layers in groups))
    x -= 6 * len(groups) - 3
    for kind, name, layers in groups:
        begin[kind] = x
        parts.append(_text("c", x + 31 * len(layers[0][0]) / 2 - 1, 20, name))
        x += 31 * len(layers[0][0]) + 6
    parts.append(_text("c", x + 31 * SEGMENT / 2 - 1, 20, "segment"))
    for segment in range(len(TOKENS) // SEGMENT + 1):
        tokens = TOKENS[segment * SEGMENT :][:SEGMENT]
        height = 31 * max(len(layers) for _, _, layers in groups)
        for kind, name, layers in groups:
            for up, slots in enumerate(reversed(layers)):
                for i, text in enumerate(slots[segment]):
                    at = begin[kind] + 31 * i, y + 31 * up
                    parts += _box(kind if text else "empty", *at, _few(text))
                if len(layers) > 1:
                    words = f"layer {len(layers) - up}"
                    parts.append(_text("s", EDGE, y + 31 * up + 19, words))
            now = " ".join(_few(text) or "empty" for text in layers[0][segment])
            told.append(f"{name} {now};")
        for i, token in enumerate(tokens):
            parts += _box("segment", x + 31 * i, y + height - 31, token)
        if not tokens:
            parts.append(_text("s", x + 2, y + height - 12, "passed on"))
        told.append(f"segment {' '.join(tokens)}." if tokens else "passed on.")
        y += height + 9
    return _picture(title, " ".join(told), y, parts)


def of_matrix(title: str, shares: list[list[int]], alphas: list[int] | None = None) -> str:
    """Share left of each token in a matrix, after each segment; ``alphas``: how much of all that
    was there each token leaves."""
    parts = []
    told = []
    y = 6.0
    for segment, row in enumerate(shares, 1):
        last = TOKENS[len(row) - 1]
        parts.append(_text("s", EDGE, y + 15, f"left in the matrix after token {last}, %"))
        for i, token in enumerate(TOKENS):
            x = EDGE + 27 * i
            if i >= len(row):
                parts += _box("empty", x + 0.5, y + 22, "", 25)
                continue
            shade = f'width="25" height="28" rx="4" opacity="{row[i] / 100:.2f}"'
            parts.append(f'<rect class="matrix" x="{x + 0.5:g}" y="{y + 22:g}" {shade}/>')
            parts += _box("frame", x + 0.5, y + 22, token, 25)
            parts.append(_text("c", x + 13, y + 64, str(row[i])))
        told.append(f"After segment {segment}: {', '.join(map(str, row))}.")
        y += 74
    if alphas is not None:
        parts.append(
            _text(
                "s",
                EDGE,
                y + 15,
                "\N{GREEK SMALL LETTER ALPHA}: share of the past that each token keeps, %",
            )
        )
        for i, (token, alpha) in enumerate(zip(TOKENS, alphas, strict=True)):
            parts.append(_text("c t", EDGE + 27 * i + 13, y + 36, token))
            parts.append(_text("c", EDGE + 27 * i + 13, y + 54, str(alpha)))
        told.append(f"The decays: {', '.join(map(str, alphas))}.")
        y += 60
    return _picture(title, " ".join(told), y + 2, parts)


PICTURES: dict[str, Callable[[], str]] = {
    "transformer-xl": lambda: of_slots(
        "Transformer-XL: the last four inputs of every layer",
        [("memory", "memory", [slots_of("transformer-xl", "hidden", layer) for layer in (0, 1)])],
    ),
    "compressive": lambda: of_slots(
        "Compressive: tokens that leave memory, two to a slot",
        [
            ("compressed", "compressed", [slots_of("compressive", "compressed", 0)]),
            ("memory", "memory", [slots_of("compressive", "hidden", 0)]),
        ],
    ),
    "feedback": lambda: of_slots(
        "Feedback: each vector has read earlier ones",
        [("feedback", "memory vectors", [slots_of("feedback", "vectors")])],
    ),
    "sum": lambda: of_matrix("A sum: nothing leaves", left("sum")),
    "delta": lambda: of_matrix("The delta rule: similar keys overwrite", left("delta")),
    "gated-delta": lambda: of_matrix(
        "With a decay, old tokens fade", left("gated-delta"), decays("gated-delta")
    ),
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")
        print(f"written: {FOLDER / name}.svg")


if __name__ == "__main__":
    main()
