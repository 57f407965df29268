"""The kinds of checkpoints that can be converted; no torch here, since help lists them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from memspan.errors import MemspanError, refuse_unknown

KindName = Literal["transformers", "authors"]
KIND_HELP = (
    "Origin of the checkpoint (None: recognised by the folder's files). transformers: a folder such as "
    "transfo-xl-wt103, or one that memspan exported. authors: one from the PyTorch code "
    "of Transformer-XL's authors."
)


@dataclass(frozen=True)
class Kind:
    """A kind of checkpoint."""

    module: str
    """The module in :mod:`memspan.lab.converters` whose ``read`` returns the checkpoint in a folder."""
    signs: tuple[str, ...]
    """The files that identify its folders."""
    holds: str
    """The files that a folder must hold, for messages."""


KINDS: dict[KindName, Kind] = {
    "transformers": Kind(
        "transfo_xl",
        ("config.json",),
        "config.json, pytorch_model.bin or model.safetensors, and vocab.pkl or vocab.bin",
    ),
    "authors": Kind(
        "authors",
        ("model.pt", "model_state.pt"),
        "model.pt, or model_state.pt with args.json, and the cache.pt of the corpus",
    ),
}


def kind_of(folder: Path, name: KindName | None) -> Kind:
    """The kind of the checkpoint in ``folder``; ``name``: as the user says (None: detect it)."""
    refuse_unknown("kind of checkpoints", name, KindName)
    if not folder.is_dir():
        wanted = "; ".join(f"{kind}: {entry.holds}" for kind, entry in KINDS.items())
        raise MemspanError(
            f"there is no folder {folder}, and memspan does not download checkpoints: put the files "
            f"into a folder and give its path ({wanted})"
        )
    if name is not None:
        return KINDS[name]
    for entry in KINDS.values():
        if any((folder / sign).exists() for sign in entry.signs):
            return entry
    signs = ", ".join(f"{' or '.join(e.signs)} ({kind})" for kind, e in KINDS.items())
    raise MemspanError(
        f"{folder} is not a checkpoint that memspan knows: one of these files must be in it: {signs}"
    )
