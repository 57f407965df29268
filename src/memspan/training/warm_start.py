"""Starting from another run's weights: the same architecture's, or those that mean the same."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from memspan.data.tokenizers import Tokenizer
from memspan.errors import MemspanError
from memspan.models import FastWeights, Feedback, LanguageModel, TransformerXL
from memspan.nn import sinusoids
from memspan.runs.run import Run


@dataclass(frozen=True)
class WarmStart:
    """Which of the model's tensors were taken, in part, or not at all."""

    source: str
    mapped: list[str]
    partly: list[str]
    fresh: list[str]

    def summary(self) -> str:
        """A few lines for people; layers of one kind are named once."""
        lines = [f"initialised from {self.source}: {len(self.mapped)} tensors mapped"]
        for title, names in (
            ("mapped", self.mapped),
            ("in part", self.partly),
            ("new", self.fresh),
        ):
            if names:
                lines.append(f"  {title}: {', '.join(_by_kind(names))}")
        return "\n".join(lines)


@torch.no_grad()
def initialise_from(model: LanguageModel, tokenizer: Tokenizer, source: Run) -> WarmStart:
    """Copy into ``model`` what ``source`` has for it.

    Raises:
        MemspanError: another width, other heads, another vocabulary, or an unrelated architecture.
    """
    ours, theirs = model.backbone.config, source.config.model
    if ours.d_model != theirs.d_model:
        raise MemspanError(
            f"{source.folder} has d_model {theirs.d_model} and this model {ours.d_model}: "
            f"--init-from needs the same width, set --model.d-model {theirs.d_model}"
        )
    if tokenizer.vocabulary_hash != source.tokenizer.vocabulary_hash:
        raise MemspanError(
            f"{source.folder} has another vocabulary ({source.tokenizer.kind}, "
            f"{source.tokenizer.vocab_size:,} tokens; here {tokenizer.kind}, "
            f"{tokenizer.vocab_size:,}): --init-from needs the same corpus and tokenizer"
        )
    if type(model.backbone) is type(source.model.backbone):
        found = source.model.state_dict()
    elif isinstance(model.backbone, Feedback) and isinstance(source.model.backbone, TransformerXL):
        if (ours.n_heads, ours.head_width) != (theirs.n_heads, theirs.head_width):
            raise MemspanError(
                f"{source.folder} has {theirs.n_heads} heads of {theirs.head_width} and this model "
                f"{ours.n_heads} of {ours.head_width}: set --model.n-heads and --model.d-head alike"
            )
        codes = None
        if theirs.positions == "sinusoidal":
            distances = torch.arange(1, ours.table_rows + 1)
            codes = sinusoids(distances, ours.d_model, torch.float32)
        state = {n: t.cpu() for n, t in source.model.backbone.state_dict().items()}
        adapted = model.backbone.adapted(state, codes)
        found = {n: t for n, t in source.model.state_dict().items() if "backbone." not in n}
        found |= {f"backbone.{n}": t for n, t in adapted.items()}
    else:
        raise MemspanError(
            f"{source.folder} is a {source.config.architecture}: --init-from takes a run of the same "
            "architecture, or for feedback a transformer-xl"
        )
    report = _copy(model, found, str(source.folder))
    if isinstance(model.backbone, FastWeights):
        # Its own map's name, not that of the run whose memories it could not read.
        model.backbone.identify_features()
    return report


def _copy(model: LanguageModel, found: dict[str, Tensor], source: str) -> WarmStart:
    report = WarmStart(source, [], [], [])
    for name, own in model.state_dict().items():
        if name.endswith("feature_id"):
            continue
        given = found.get(name)
        if given is not None and given.shape == own.shape:
            own.copy_(given)
            report.mapped.append(name)
        elif given is not None and "position_" in name and given.shape[1:] == own.shape[1:]:
            rows = min(len(given), len(own))
            own[:rows].copy_(given[:rows])
            # The other table may be the longer one.
            (report.mapped if rows == len(own) else report.partly).append(name)
        else:
            report.fresh.append(name)
    return report


def _by_kind(names: list[str]) -> list[str]:
    return list(dict.fromkeys(re.sub(r"layers\.\d+", "layers.*", name) for name in names))
