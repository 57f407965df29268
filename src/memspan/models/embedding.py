"""Token embeddings and output heads, plain or adaptive, and the tensors that they share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memspan.errors import MemspanError
from memspan.models.known import known
from memspan.models.options import EmbeddingConfig
from memspan.models.packing import is_itself
from memspan.models.recomputation import recomputed
from memspan.nn import NOT_SCORED, in_chunks


class Embedding(nn.Module):
    """Token embedding, plain or adaptive (Baevski and Auli 2019, arXiv 1809.10853).

    ``cutoffs`` split the vocabulary into clusters of falling frequency. With ``div_val > 1`` cluster
    ``i`` has a table of width ``d_embed / div_val**i`` and a projection to ``d_model``. With
    ``div_val = 1`` all clusters share one table and one projection, and matter only at the output.
    Shapes: ``tables[i]`` is ``[rows, width]``, ``projections[i]`` is ``[D, width]``. A single table of
    the model's width has no projection.

    Raises:
        MemspanError: a cutoff lies outside the vocabulary, or ``div_val`` leaves a cluster no width.
    """

    def __init__(self, vocab_size: int, d_model: int, config: EmbeddingConfig) -> None:
        super().__init__()
        if config.cutoffs and config.cutoffs[-1] >= vocab_size:
            raise MemspanError(
                f"the last cutoff {config.cutoffs[-1]} is not below the vocabulary's "
                f"{vocab_size}: lower or drop --embedding.cutoffs"
            )
        d_embed = config.d_embed or d_model
        self.d_model = d_model
        self.vocab_size = vocab_size
        self.scale = d_model**0.5 if config.scale else 1.0
        self.edges = (0, *config.cutoffs, vocab_size) if config.div_val > 1 else (0, vocab_size)
        sizes = [high - low for low, high in zip(self.edges, self.edges[1:], strict=False)]
        widths = [d_embed // config.div_val**i for i in range(len(sizes))]
        if widths[-1] < 1:
            raise MemspanError(
                f"div_val {config.div_val} leaves cluster {len(sizes) - 1} no width: lower it, "
                "raise d_embed or use fewer cutoffs"
            )
        self.tables = nn.ParameterList(
            nn.Parameter(torch.empty(n, w)) for n, w in zip(sizes, widths, strict=True)
        )
        self.projected = config.div_val > 1 or d_embed != d_model
        self.projections = nn.ParameterList(
            nn.Parameter(torch.empty(d_model, w)) for w in (widths if self.projected else [])
        )

    @property
    def weight(self) -> Tensor:
        """One row for each token, before ``scale``: the only table, as in :class:`torch.nn.Embedding`;
        of several, what they are projected to, ``[V, D]``."""
        if len(self.tables) == 1:
            return self.tables[0]
        parts = zip(self.tables, self.projections, strict=True)
        return torch.cat([F.linear(table, projection) for table, projection in parts])

    def forward(self, tokens: Tensor) -> Tensor:
        """``int64 [B, T] -> [B, T, D]``."""
        # Looking up modules and parameters takes a reader's single token as long as computing does.
        table = self.tables[0]
        if tokens.device != table.device:
            # Torch may read whatever is in memory.
            raise MemspanError(
                f"the tokens are on {tokens.device} and the model is on {table.device}: move one of "
                "them"
            )
        if len(self.edges) == 2:
            x = F.embedding(tokens, table)
            if self.projected:
                # The residual stream keeps the parameters' precision, even under autocast.
                x = F.linear(x, self.projections[0]).to(x.dtype)
            return x if self.scale == 1 else x * self.scale
        x = table.new_zeros(*tokens.shape, self.d_model)
        for i, (table, projection) in enumerate(zip(self.tables, self.projections, strict=True)):
            low = self.edges[i]
            high = self.edges[i + 1]
            # The first and last clusters are open-ended, so that the look-up refuses ids outside.
            here = (tokens >= low) | (i == 0)
            if i < len(self.tables) - 1:
                here = here & (tokens < high)
            rows = F.linear(F.embedding(tokens[here] - low, table), projection)
            x = x.index_put(here.nonzero(as_tuple=True), rows.to(x.dtype))
        return x * self.scale


@known()
class Head(nn.Module):
    """Output layer, plain or adaptive softmax (Grave et al. 2017, arXiv 1609.04309).

    The head cluster scores its own words and one entry per tail cluster (``cluster_weight``, in
    order); a word in tail ``i`` gets ``log p(tail i) + log p(word | tail i)``. Tables and projections
    may be shared with the embedding, see :class:`~memspan.models.EmbeddingConfig`.
    """

    recompute: bool = False
    """True if losses keep no logits for backward, see :attr:`memspan.LanguageModel.recompute`."""

    def __init__(self, embedding: Embedding, config: EmbeddingConfig) -> None:
        super().__init__()
        self.edges = (0, *config.cutoffs, embedding.vocab_size)
        n_clusters = len(self.edges) - 1
        self.by_cluster = config.div_val > 1
        # A list of its own even if tied: torch.func would restore a module under two names wrongly.
        self.tables = nn.ParameterList(
            t if config.tie else nn.Parameter(torch.empty(t.shape)) for t in embedding.tables
        )
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(len(t))) for t in self.tables)
        first_tied = {"none": n_clusters, "all-but-first": 1, "all": 0}[config.tie_projections]
        self.projected = embedding.projected
        self.projections = nn.ParameterList()
        for i in range(n_clusters if self.projected else 0):
            source = embedding.projections[i if self.by_cluster else 0]
            tied = i >= first_tied
            self.projections.append(source if tied else nn.Parameter(torch.empty(source.shape)))
        if n_clusters > 1:
            width = self.tables[0].shape[1]
            self.cluster_weight = nn.Parameter(torch.empty(n_clusters - 1, width))
            self.cluster_bias = nn.Parameter(torch.zeros(n_clusters - 1))

    @property
    def weight(self) -> Tensor:
        """``[V, D]`` as in :class:`torch.nn.Linear`: ``logits = hidden @ weight.T + bias``.

        Raises:
            MemspanError: an adaptive softmax, which is not one matrix.
        """
        if len(self.edges) > 2:
            raise MemspanError(
                "an adaptive softmax has no weight of its own: call the head for its logits"
            )
        return F.linear(self.tables[0], self.projections[0]) if self.projected else self.tables[0]

    @property
    def bias(self) -> Tensor:
        """``[V]``, see :attr:`weight`; of an adaptive softmax, those of all its clusters."""
        return torch.cat([*self.biases]) if len(self.biases) > 1 else self.biases[0]

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits ``[..., D] -> [..., V]``; with clusters, normalised log-probabilities."""
        if len(self.edges) == 2:
            return self._cluster(hidden, 0)
        head = self._head(hidden).log_softmax(-1)
        shortlist = self.edges[1]
        tails = [
            head[..., shortlist + i - 1, None] + self._cluster(hidden, i).log_softmax(-1)
            for i in range(1, len(self.edges) - 1)
        ]
        return torch.cat([head[..., :shortlist], *tails], -1)

    def losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Losses in nats, ``[B, T, D], int64 [B, T] -> [B, T]``, 0 for a target :data:`NOT_SCORED`.

        Each tail cluster is computed only for the targets in it, unless a subclass or a hook has made
        other logits than these.
        """
        if not is_itself(self, Head):
            return losses_of(self(hidden), targets)
        x = hidden.flatten(0, -2)
        words = targets.flatten()
        loss = partial(nats, recompute=self.recompute)
        if len(self.edges) == 2:
            return loss(partial(self._cluster, i=0), x, words).view_as(targets)
        cluster = torch.bucketize(
            words.contiguous(), torch.tensor(self.edges[1:-1], device=x.device), right=True
        )
        column = torch.where(cluster == 0, words, self.edges[1] + cluster - 1)
        losses = loss(self._head, x, column)
        for i in range(1, len(self.edges) - 1):
            rows = (cluster == i).nonzero().squeeze(1)
            tail = partial(self._cluster, i=i)
            tail_nats = loss(tail, x.index_select(0, rows), words[rows] - self.edges[i])
            losses = losses.index_add(0, rows, tail_nats)
        return losses.view_as(targets)

    def _head(self, x: Tensor) -> Tensor:
        weight, bias = self._table(0)
        weight = torch.cat([weight, self.cluster_weight])
        return F.linear(self._project(x, 0), weight, torch.cat([bias, self.cluster_bias]))

    def _cluster(self, x: Tensor, i: int) -> Tensor:
        return F.linear(self._project(x, i), *self._table(i))

    def _project(self, x: Tensor, i: int) -> Tensor:
        return F.linear(x, self.projections[i].t()) if self.projected else x

    def _table(self, i: int) -> tuple[Tensor, Tensor]:
        if self.by_cluster or len(self.edges) == 2:
            return self.tables[i], self.biases[i]
        rows = slice(self.edges[i], self.edges[i + 1])
        return self.tables[0][rows], self.biases[0][rows]


def losses_of(logits: Tensor, targets: Tensor) -> Tensor:
    """``[B, T, V], int64 [B, T] -> [B, T]`` in nats, 0 for a target :data:`NOT_SCORED`."""
    return nats(lambda x: x, logits.flatten(0, -2), targets.flatten()).view_as(targets)


def nats(
    logits: Callable[[Tensor], Tensor], x: Tensor, words: Tensor, recompute: bool = False
) -> Tensor:
    """``-log p(words)`` under ``logits(x)``: ``[N, D], int64 [N] -> [N]``, 0 for :data:`NOT_SCORED`.

    ``recompute``: keep ``x`` for backward, and no logits.
    """

    def chunk(x: Tensor, words: Tensor) -> Tensor:
        return F.cross_entropy(logits(x), words, ignore_index=NOT_SCORED, reduction="none")

    return in_chunks(partial(recomputed, chunk) if recompute else chunk, x, words)


# ----- Tensors under several names, such as a table that is embedding and output weights. Torch
# replaces them name by name, and they are to stay one.


def tied_names(module: nn.Module) -> list[list[str]]:
    """The names of each parameter or buffer that has several."""
    names: dict[int, list[str]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            names.setdefault(id(tensor), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def tie(module: nn.Module, names: list[list[str]]) -> None:
    """Make all names of a list refer to the tensor of the first."""
    for first, *others in names:
        for name in others:
            owner, _, last = name.rpartition(".")
            setattr(module.get_submodule(owner), last, attrgetter(first)(module))


def with_ties(module: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The weights ``state`` under all names that they have in ``module``."""
    full = OrderedDict(state)
    if hasattr(state, "_metadata"):
        full._metadata = state._metadata  # type: ignore[attr-defined]
    for names in tied_names(module):
        if given := [name for name in names if name in state]:
            full.update({name: state[given[-1]] for name in names if name not in state})
    return full


def before_loading(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Make the weights that ``module`` is about to load one tensor where they are tied, the last
    that is given: with ``assign=True`` torch would make a Parameter for each name.

    A hook, see :meth:`torch.nn.Module.register_load_state_dict_pre_hook`. Names that are not given stay
    missing: safetensors and others expect torch to report them.
    """
    loaded: list[list[str]] = []
    for names in tied_names(module):
        own = attrgetter(names[0])(module)
        given = [name for name in names if isinstance(state.get(prefix + name), Tensor)]
        if not given:
            continue
        one = state[prefix + given[-1]]
        if isinstance(own, nn.Parameter) and not isinstance(one, nn.Parameter):
            one = nn.Parameter(one, requires_grad=False)
        state.update({prefix + name: one for name in given})
        loaded.append([*given, *(name for name in names if name not in given)])
    module.__dict__["_loaded_ties"] = loaded


def after_loading(module: nn.Module, _: object) -> None:
    """Tie the names that were not given to those that were: the hook after :func:`before_loading`."""
    tie(module, module.__dict__.pop("_loaded_ties", []))
