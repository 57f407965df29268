"""Starting from another run's weights, of the same architecture or of parts that mean the same."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from memspan.data.tokenizers.base import Tokenizer
from memspan.errors import MemspanError
from memspan.models import LanguageModel
from memspan.runs.folder import place_of
from memspan.runs.run import Run


@dataclass(frozen=True)
class WarmStart:
    """Which of the model's tensors were taken, wholly, in part or not at all."""

    source: str
    mapped: list[str]
    partly: list[str]
    fresh: list[str]

    def summary(self) -> str:
        """A few lines for people; layers of one kind are named once."""
        lines = [f"initialised from {self.source}: {len(self.mapped)} tensors mapped"]
        parts = {"mapped": self.mapped, "in part": self.partly, "new": self.fresh}
        for title, names in parts.items():
            if names:
                kinds = dict.fromkeys(re.sub(r"layers\.\d+", "layers.*", name) for name in names)
                lines.append(f"  {title}: {', '.join(kinds)}")
        return "\n".join(lines)


@torch.no_grad()
def initialise_from(model: LanguageModel, tokenizer: Tokenizer, source: Run) -> WarmStart:
    """Copy into ``model`` the weights of ``source`` that fit.

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
            f"{tokenizer.vocab_size:,}): --init-from needs the same, set --data.tokenizer "
            f"{place_of(source.folder).run / 'tokenizer.json'}"
        )
    if type(model.backbone) is type(source.model.backbone):
        found = source.model.state_dict()
    else:
        taken = model.backbone.taken_from(source.model.backbone)
        if taken is None:
            raise MemspanError(
                f"{source.folder} is a {source.config.architecture}, which has nothing that means the "
                f"same in this architecture: --init-from takes {ours.starts_from}"
            )
        found = {n: t for n, t in source.model.state_dict().items() if "backbone." not in n}
        found |= {f"backbone.{n}": t for n, t in taken.items()}
    report = _copy(model, found, str(source.folder))
    model.backbone.weights_replaced()
    return report


def _copy(model: LanguageModel, found: dict[str, Tensor], source: str) -> WarmStart:
    report = WarmStart(source, [], [], [])
    for name, own in model.state_dict().items():
        if not own.is_floating_point():
            # Not a weight, but a count that the model keeps.
            continue
        given, table = found.get(name), name.rpartition(".")[2] in model.backbone.tables
        if given is not None and given.shape == own.shape:
            own.copy_(given)
            report.mapped.append(name)
        elif given is not None and table and given.shape[1:] == own.shape[1:]:
            rows = min(len(given), len(own))
            own[:rows].copy_(given[:rows])
            # Either table may be the longer one.
            (report.mapped if rows == len(own) else report.partly).append(name)
        else:
            report.fresh.append(name)
    return report
