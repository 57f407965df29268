"""Initialises a model from another run's weights, wherever parts of both mean the same."""

from __future__ import annotations

import copy
import dataclasses
import re
from dataclasses import dataclass, field

import torch
from torch import Tensor

from memspan.errors import MemspanError
from memspan.lab.data.tokenizers.base import Tokenizer
from memspan.lab.runs.folder import place_of
from memspan.lab.runs.run import Run
from memspan.models import LanguageModel
from memspan.models.embedding import tied_names
from memspan.models.options import BackboneConfig


@dataclass
class WarmStart:
    """Record of the model's tensors that were copied wholly, in part or not at all."""

    source: str
    mapped: list[str]
    partly: list[str]
    fresh: list[str]
    differing: list[str] = field(default_factory=list)
    """Options that make the same weights compute something else."""
    rows: int = 0
    """Tokens of the vocabulary, if it differs from the source's."""
    new_rows: int = 0
    """Tokens that the source does not have."""

    def summary(self) -> str:
        """A few lines for people; layers of one kind are named once."""
        lines = [f"initialised from {self.source}: {len(self.mapped)} tensors mapped"]
        parts = {"mapped": self.mapped, "in part": self.partly, "new": self.fresh}
        for title, names in parts.items():
            if names:
                kinds = dict.fromkeys(re.sub(r"layers\.\d+", "layers.*", name) for name in names)
                lines.append(f"  {title}: {', '.join(kinds)}")
        if self.rows:
            lines.append(
                f"  vocabulary: {self.new_rows:,} of {self.rows:,} rows of embedding and output are "
                "new; each starts as the mean of the others, or of the last cluster's"
            )
        if self.differing:
            lines.append(
                "  not as in that run, so that the same weights compute something else: "
                + "; ".join(self.differing)
            )
        return "\n".join(lines)


HEADS = ("n_heads", "head_width", "value_heads", "value_width", "activation")
"""Options that a layer's weights were trained for: with other heads or another activation, they would
fit and mean nothing."""


@torch.no_grad()
def initialise_from(model: LanguageModel, tokenizer: Tokenizer, source: Run) -> WarmStart:
    """Copy into ``model`` the weights of ``source`` that fit.

    A vocabulary that has all tokens of the source's, in any order, and more, takes its rows; the others
    start as :meth:`~memspan.LanguageModel.resize_token_embeddings` says.

    Raises:
        MemspanError: another width, other heads, another activation, a vocabulary that lacks tokens of
            the source's, or an unrelated architecture.
    """
    ours = model.backbone.config
    theirs = source.config.model
    if ours.d_model != theirs.d_model:
        raise MemspanError(
            f"{source.folder} has d_model {theirs.d_model} and this model {ours.d_model}: "
            f"--init-from needs the same width; set --model.d-model {theirs.d_model}"
        )
    rows = _rows(tokenizer, source)
    if type(model.backbone) is type(source.model.backbone):
        found = source.model.state_dict()
    else:
        taken = model.backbone.taken_from(source.model.backbone)
        if taken is None:
            raise MemspanError(
                f"{source.folder} is of architecture {source.config.architecture}, whose weights mean "
                f"nothing here: --init-from takes {ours.starts_from}"
            )
        found = {n: t for n, t in source.model.state_dict().items() if "backbone." not in n}
        found |= {f"backbone.{n}": t for n, t in taken.items()}
    _refuse_other_layers(ours, theirs, source)
    if rows is not None:
        found |= _with_rows(source, rows)
    report = _copy(model, found, str(source.folder))
    report.differing.extend(_differing(model, source))
    if rows is not None:
        report.new_rows = len(rows) - source.tokenizer.vocab_size
        report.rows = len(rows)
    return report


def _rows(tokenizer: Tokenizer, source: Run) -> Tensor | None:
    """The row of the source for each token, ``int64 [V]``; new tokens have the rows after those. None:
    the vocabularies are the same."""
    theirs = source.tokenizer
    if tokenizer.vocabulary_hash == theirs.vocabulary_hash:
        return None
    ids: dict[object, int] = {}
    if tokenizer.kind == theirs.kind:
        ids = {token: n for n, token in enumerate(tokenizer.tokens())}
    lacking = [token for token in theirs.tokens() if token not in ids]
    if lacking:
        which = ""
        if ids:
            which = f", and {len(lacking):,} of its tokens are not here, such as {lacking[0]!r:.40}"
        own = place_of(source.folder).run / "tokenizer.json"
        raise MemspanError(
            f"{source.folder} has another vocabulary ({theirs.kind}, {theirs.vocab_size:,} tokens; "
            f"here {tokenizer.kind}, {tokenizer.vocab_size:,}{which}): --init-from needs the same, or "
            f"one with more tokens; set --data.tokenizer {own}"
        )
    rows = torch.full((tokenizer.vocab_size,), -1)
    rows[[ids[token] for token in theirs.tokens()]] = torch.arange(theirs.vocab_size)
    rows[rows < 0] = torch.arange(theirs.vocab_size, tokenizer.vocab_size)
    if source.config.embedding.cutoffs and not torch.equal(rows, torch.arange(len(rows))):
        raise MemspanError(
            f"{source.folder} has clusters of tokens by their ids (embedding.cutoffs), and this "
            "vocabulary has other ids for them: add new tokens after the old ones"
        )
    return rows


def _with_rows(source: Run, rows: Tensor) -> dict[str, Tensor]:
    """The source's embedding and head with rows in this order, by name."""
    larger = copy.deepcopy(source.model)
    larger.resize_token_embeddings(len(rows))
    parts = {n: t for n, t in larger.state_dict().items() if "backbone." not in n}
    if source.config.embedding.cutoffs:
        return parts
    by_token = ("tables.0", "biases.0")
    return {n: t[rows.to(t.device)] if n.endswith(by_token) else t for n, t in parts.items()}


def _refuse_other_layers(ours: BackboneConfig, theirs: BackboneConfig, source: Run) -> None:
    """Refuse options with which the weights would mean something else."""
    for name in HEADS:
        here = getattr(ours, name, None)
        there = getattr(theirs, name, None)
        if None not in (here, there) and here != there:
            option = {
                "head_width": "d_head",
                "value_heads": "n_value_heads",
                "value_width": "d_value",
            }
            name = option.get(name, name)
            raise MemspanError(
                f"{source.folder} has {name} {there} and this model {here}, for which its weights were "
                f"not trained: set --model.{name.replace('_', '-')} {there}"
            )


def _differing(model: LanguageModel, source: Run) -> list[str]:
    """Other options that make the same weights compute something else, as text."""
    pairs = (
        ("model", model.backbone.config, source.config.model),
        ("embedding", model._embedding_options, source.config.embedding),
    )
    lines = []
    for section, ours, theirs in pairs:
        counted = {
            field.name
            for field in dataclasses.fields(ours)  # type: ignore[arg-type]
            if field.name not in ours.same_function and field.name not in theirs.same_function
        }
        for name in sorted(counted - {"n_layers", "d_ff"}):
            here = getattr(ours, name)
            there = getattr(theirs, name, getattr(ours, name))
            if here != there:
                lines.append(f"{section}.{name} {here}, there {there}")
    return lines


def _copy(model: LanguageModel, found: dict[str, Tensor], source: str) -> WarmStart:
    report = WarmStart(source, [], [], [])
    for names in tied_names(model):
        several = [found[name] for name in names if name in found]
        if any(not torch.equal(each, several[0]) for each in several[1:]):
            # One tensor here stands for several there, none of which suits all layers.
            found = {name: tensor for name, tensor in found.items() if name not in names}
    for name, own in model.state_dict().items():
        if not own.is_floating_point():
            # Not a weight, but a count that the model keeps.
            continue
        given = found.get(name)
        table = name.rpartition(".")[2] in model.backbone.tables
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
