"""The trained runs that come with memspan: trained, stored in half precision, scored, described.

    python benchmarks/shipped_runs.py [--text PATH] [--work runs/shipped] [--only NAME ...]

Each is a preset for Tiny Shakespeare at a smaller width, so that all of them take less than 4 MB. They
are trained on the first nine tenths of the text and scored once, at the end, on the last tenth, in one
stream: with the float32 weights, and with the float16 weights that ship. The runs go to
src/memspan/lab/trained, with a card each, the figures to benchmarks/results/shipped-runs.json, and what
`memspan measure` finds to span-ARCHITECTURE.json beside it, for the annotated pages. Training goes on
in --work where it was stopped; what is finished there is not trained again.

Fast Weights are trained on some stretches with their lines joined; docs/measured/fast_weights.md says
why.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import shutil
import textwrap
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import memspan
import timing
from memspan.files.tensors import load_tensors, save_tensors
from memspan.lab.data.named import HELD_OUT, SHAKESPEARE
from memspan.lab.data.prepared import prepare
from memspan.lab.data.token_files import identity
from memspan.lab.data.tokenizers.plain import ByteTokenizer
from memspan.lab.measurement.report import Report
from memspan.lab.runs import checkpoints
from memspan.lab.runs.checkpoint_files import WEIGHTS
from memspan.lab.runs.folder import BOUND
from memspan.lab.runs.options import RunConfig, load_config, read_config, to_toml
from memspan.models import BackboneConfig
from page_tables import markdown
from shakespeare import PRESETS, add_text
from timing import machine

TRAINED = HELD_OUT.parent
"""Where the runs ship from."""
RESULTS = timing.RESULTS / "shipped-runs.json"
SPAN = "span-{}.json"
"""Measurements of an architecture's run, in the folder of results."""
CARD = Path(__file__).with_name("shipped_run.md")
"""The card of a run, with fields for its figures."""
JOINED = """, about one stretch in {:.0f} with its lines joined by spaces, so that it can read text \
without line breaks"""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A shipped run: what differs from the preset of its architecture."""

    architecture: str
    steps: int
    model: dict[str, int]
    joined: float = 0.0
    """Share of the training text whose lines are joined by spaces."""


RECIPES = {
    "shakespeare": Recipe("transformer-xl", 4000, {"d_model": 80, "n_heads": 4, "d_ff": 288}),
    "shakespeare-compressive": Recipe("compressive", 3344, {"d_model": 72, "d_ff": 264}),
    "shakespeare-feedback": Recipe("feedback", 2500, {"d_model": 112, "d_ff": 400}),
    "shakespeare-fast-weights": Recipe(
        "fast-weights", 6000, {"d_model": 84, "d_ff": 328}, joined=0.05
    ),
    "shakespeare-gated-delta-net": Recipe(
        "gated-delta-net", 4000, {"d_model": 80, "n_heads": 4, "d_ff": 320}
    ),
}


def joined(text: bytes, share: float, seed: int = 0) -> bytes:
    """The text, ``share`` of its stretches on one line: whole speeches, 300 to 1,500 bytes or so."""
    rng = random.Random(seed)
    speeches = text.split(b"\n\n")
    parts = []
    while speeches:
        length = rng.randrange(300, 1500)
        size = 0
        count = 0
        while count < len(speeches) and size < length:
            size += len(speeches[count]) + 2
            count += 1
        part = b"\n\n".join(speeches[:count])
        speeches = speeches[count:]
        parts.append(b" ".join(part.split()) if rng.random() < share else part)
    return b"\n\n".join(parts)


def config_of(name: str, work: Path) -> RunConfig[Any]:
    """All options of its training; a text with joined lines is written into ``work``."""
    recipe = RECIPES[name]
    preset = read_config(PRESETS[recipe.architecture])
    # The last tenth chooses nothing: it is scored once.
    once = {"evaluate_every": 0, "evaluate_tokens": 0}
    loop = dataclasses.replace(preset.train, steps=recipe.steps, **once)
    model = dataclasses.replace(preset.model, **recipe.model)
    data = preset.data
    if recipe.joined:
        whole = SHAKESPEARE.path.read_bytes()
        cut = len(whole) * 9 // 10
        text = joined(whole[:cut], recipe.joined)
        # And the tenth more that a file keeps for scoring.
        (file := work / f"{name}.txt").write_bytes(text + whole[cut:][: len(text) // 9])
        data = dataclasses.replace(data, corpus=str(file))
    return dataclasses.replace(preset, model=model, train=loop, data=data)


def trained(name: str, config: RunConfig[Any], work: Path, init_from: Path | None = None) -> bool:
    """Train the run in ``work``, or go on with it; whether it is finished.

    Its weights begin as those of the run ``init_from``, if any. CPU seconds are added up in a file
    beside it.
    """
    folder = work / name
    spent = work / f"{name}.seconds"
    begun = bool(checkpoints.steps_of(folder))
    if begun and checkpoints.latest(folder).state["step"] >= config.train.steps:
        return True
    start = time.process_time()
    if begun:
        memspan.resume(folder, console=Console())
    else:
        memspan.train(config, folder, init_from=init_from, console=Console())
    before = float(spent.read_text()) if begun and spent.is_file() else 0.0
    spent.write_text(f"{before + time.process_time() - start:.1f}\n")
    return checkpoints.latest(folder).state["step"] >= config.train.steps


def stored(name: str, work: Path) -> Path:
    """Write what ships of a finished run, whose corpus is the text that ships: see :func:`halved`."""
    shipped = identity(prepare(HELD_OUT.stem, "bytes", with_tokenizer=ByteTokenizer()).splits)
    return halved(work / name, TRAINED / name, HELD_OUT.stem, shipped)


def halved(
    source: Path, folder: Path, corpus: str | None = None, held_out: dict[str, Any] | None = None
) -> Path:
    """Write a finished run in half precision and without training state.

    Args:
        source: the run.
        folder: where it ships from.
        corpus: the corpus that it names (None: its own).
        held_out: what stands in the weights for the corpus's other splits than the one for training
            (None: what stands there).

    Returns:
        ``folder``.
    """
    weights, header = load_tensors(source / WEIGHTS)
    config = load_config(source)
    data = dataclasses.replace(config.data, corpus=corpus or config.data.corpus)
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(to_toml(dataclasses.replace(config, data=data)))
    shutil.copyfile(source / "tokenizer.json", folder / "tokenizer.json")
    bound = {file: hashlib.sha256((folder / file).read_bytes()).hexdigest() for file in BOUND}
    read = json.loads(header["corpus"])
    if held_out is not None:
        read = {"train": read["train"]} | held_out
    about = {"step": header["step"], "corpus": json.dumps(read, sort_keys=True)} | bound
    halves = {key: x.half() if x.is_floating_point() else x for key, x in weights.items()}
    save_tensors(folder / WEIGHTS, halves, about)
    return folder


def figures(name: str, work: Path, folder: Path) -> dict[str, Any]:
    """The scores of a run as trained and as shipped, and what it took."""
    as_trained, as_shipped = (memspan.evaluate(run, HELD_OUT.stem) for run in (work / name, folder))
    run = memspan.load(folder)
    return {
        "architecture": run.config.architecture,
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "bytes": (folder / WEIGHTS).stat().st_size,
        "steps": run.step,
        "cpu_seconds": float((work / f"{name}.seconds").read_text()),
        "bytes_scored": as_shipped.n_bytes,
        "bits_per_byte": as_shipped.bits_per_byte,
        "bits_per_byte_float32": as_trained.bits_per_byte,
        "machine": machine(),
    }


def card(name: str, row: dict[str, Any]) -> str:
    """Describe a run for its users, in Markdown."""
    config = load_config(TRAINED / name)
    text = CARD.read_text().format(
        **(row["machine"] | row),
        name=name,
        url=SHAKESPEARE.url,
        held_out=HELD_OUT.stem,
        preset=PRESETS[config.architecture].stem,
        changed=listed(RECIPES[name].model),
        read=config.train.batch_size * config.train.tokens_read(row["steps"]),
        joined=JOINED.format(1 / share) if (share := RECIPES[name].joined) else "",
        seed=config.train.seed,
        minutes=row["cpu_seconds"] / 60,
        sizes=sizes_of(config.model),
        rounding=row["bits_per_byte"] - row["bits_per_byte_float32"],
    )
    return wrapped(text)


def wrapped(text: str) -> str:
    """A card with its paragraphs wrapped."""
    wrap = textwrap.TextWrapper(118, break_long_words=False, break_on_hyphens=False)
    parts = text.strip().split("\n\n")
    return "\n\n".join(p if p.startswith("  ") else wrap.fill(p) for p in parts) + "\n"


def sizes_of(model: BackboneConfig) -> str:
    """The sizes among a model's options."""
    sizes = {
        key: value
        for key, value in dataclasses.asdict(model).items()
        if value and (key.startswith(("n_", "d_")) or key.endswith(("_length", "_rate")))
    }
    return listed(sizes)


def listed(options: dict[str, Any]) -> str:
    """Options and their values in a sentence."""
    return ", ".join(f"`{key}` {value}" for key, value in options.items())


def measured(name: str) -> dict[str, Any]:
    """The report of ``memspan measure NAME``, without the folders of this machine."""
    measurement = dataclasses.replace(memspan.measure(TRAINED / name), run=name)
    where = machine() | {"command": f"memspan measure {name}"}
    return Report([measurement]).as_dict() | {"machine": where}


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The runs side by side, in Markdown; docs/guides/trained-runs.md has it."""
    lines = [["run", "`--model`", "parameters", "bytes", "bits per byte"]]
    for name, row in rows.items():
        sizes = [f"{row[field]:,}" for field in ("parameters", "bytes")]
        bits = f"{row['bits_per_byte']:.3f}"
        lines.append([f"`{name}`", f"`{row['architecture']}`", *sizes, bits])
    return markdown(lines)


def main() -> None:
    parser = timing.parser(__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/shipped"), help="where to train")
    parser.add_argument("--only", nargs="+", default=list(RECIPES), choices=RECIPES, metavar="NAME")
    add_text(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not SHAKESPEARE.path.exists():
        # Its checksum is compared when it is read.
        SHAKESPEARE.path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(options.text, SHAKESPEARE.path)
    options.work.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        if not trained(name, config_of(name, options.work), options.work):
            return
        row = figures(name, options.work, stored(name, options.work))
        found = (json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}) | {name: row}
        found = {key: found[key] for key in RECIPES if key in found}
        _write(RESULTS, found)
        (TRAINED / name / "README.md").write_text(card(name, row))
        print(table(found))
        _write(RESULTS.parent / SPAN.format(row["architecture"]), measured(name))


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
