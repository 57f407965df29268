"""A language model's vocabulary made larger or smaller: the rows of its embedding and output head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from memspan.errors import MemspanError
from memspan.models.embedding import Embedding, Head, tie, tied_names
from memspan.models.sizes import refuse_oversized_model

if TYPE_CHECKING:
    from memspan.models.language_model import LanguageModel


@torch.no_grad()
def resize(model: LanguageModel, vocab_size: int) -> None:
    """See :meth:`memspan.LanguageModel.resize_token_embeddings`."""
    embedding = model.embedding
    head = model.head
    _refuse(embedding, head, vocab_size)
    refuse_oversized_model(model.backbone.config, vocab_size, model._embedding_options)
    # Without clusters of their own tables, the last cluster's rows are the end of the only table.
    begin = head.edges[-2]
    in_table = 0 if head.by_cluster else head.edges[-2]
    n_rows = vocab_size - begin + in_table
    tied = tied_names(model)
    for rows in (embedding.tables, head.tables, head.biases):
        rows[-1] = _with_rows(rows[-1], n_rows, in_table)
    # Each of a tied tensor's names now has a Parameter of its own.
    tie(model, tied)
    embedding.edges = (*embedding.edges[:-1], vocab_size)
    head.edges = (*head.edges[:-1], vocab_size)
    model.vocab_size = embedding.vocab_size = vocab_size


def _with_rows(rows: Tensor, n_rows: int, first: int) -> nn.Parameter:
    """``rows`` cut to ``n_rows``, or lengthened with the mean of those from ``first`` on."""
    mean = rows[first:].mean(0, keepdim=True)
    new = mean.expand(max(n_rows - len(rows), 0), *rows.shape[1:])
    return nn.Parameter(torch.cat([rows[:n_rows], new]), rows.requires_grad)


def _refuse(embedding: nn.Module, head: nn.Module, vocab_size: object) -> None:
    if type(vocab_size) is not int or vocab_size < 1:
        raise MemspanError(f"vocab_size must be an integer of at least 1, not {vocab_size!r}")
    for what, part, kind in (("embedding", embedding, Embedding), ("head", head, Head)):
        if not isinstance(part, kind):
            raise MemspanError(
                f"the model's {what} is a {type(part).__name__}, whose rows are not known here: resize "
                "the model before its modules are replaced"
            )
        if any(hasattr(table, "placements") for table in part.parameters()):
            raise MemspanError(
                f"the model's {what} is shared between processes: resize the model before that"
            )
    assert isinstance(head, Head)
    last = head.edges[-2]
    if vocab_size <= last:
        raise MemspanError(
            f"the last cluster of the embedding begins at token {last}, and a vocabulary of "
            f"{vocab_size} would leave it empty: choose at least {last + 1}"
        )
