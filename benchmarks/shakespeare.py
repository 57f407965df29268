"""Tiny Shakespeare: the presets that are tuned to it, where its text is, and its last tenth."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from memspan.lab.runs.options import PRESETS as ALL_PRESETS
from memspan.lab.runs.options import RunConfig, read_config
from memspan.models.relative.options import RelativeConfig

PRESETS = {
    read_config(file).architecture: file
    for name, file in ALL_PRESETS.items()
    if name.startswith("tiny-shakespeare")
}
"""Each architecture's, name -> file."""


def preset(architecture: str) -> RunConfig[Any]:
    """An architecture's preset as the published results have it: with learned positions where there is
    a choice. benchmarks/positions.py says what the sinusoids of today's presets change."""
    config = read_config(PRESETS[architecture])
    if not isinstance(config.model, RelativeConfig):
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, positions="learned"))


def parts(text: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """The bytes that are trained on, the first nine tenths, and the last tenth."""
    whole = np.frombuffer(Path(text).read_bytes(), np.uint8)
    cut = len(whole) * 9 // 10
    return whole[:cut], whole[cut:]


def add_text(parser: argparse.ArgumentParser) -> None:
    """The option that says where the text is."""
    parser.add_argument(
        "--text",
        type=_existing,
        default=str(Path(__file__).resolve().parents[2] / "shared/data/tiny-shakespeare.txt"),
        help="Tiny Shakespeare (default: ../shared/data/tiny-shakespeare.txt)",
    )


def _existing(name: str) -> Path:
    if not Path(name).is_file():
        raise argparse.ArgumentTypeError(f"no file {name}: give Tiny Shakespeare with --text")
    return Path(name)
