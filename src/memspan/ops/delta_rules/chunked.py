"""The generalized delta rule by chunks of tokens (Yang et al. 2024, arXiv 2406.06484), in PyTorch.

In a chunk that begins with the memory ``S``, let ``X_s`` be vectors times the decay since its start,
``X_u`` times that until its end, and ``<X, Y>`` the lower triangle of all products of ``X`` with ``Y``,
times the decays between their tokens. With ``R``, which the tokens look up with ``c`` before their own
decay::

    (I + <C, A>) R = C_s S + <C, K> V
    Y  = Q_s S + <Q, K> V - <Q, A> R
    S' = diag(alpha_1 ... alpha_G) S + K_u^T V - A_u^T R

In the delta rule, where ``a = beta k`` and ``c = alpha k``, one product is enough for the write and for
what is erased: of ``R - V``, which is ``(I + <K, A>)^-1 (K_s S - V)``.

All but ``R`` and ``S'`` is computed for many chunks at once: one triangular solve, else products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memspan.ops.chunks import by_chunks
from memspan.ops.delta_rules.decays import ChannelDecay, Decay, HeadDecay, NoDecay
from memspan.ops.delta_rules.rule import Inputs


def run(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Read all tokens; a document's start is a decay of zero, before which nothing is found."""
    inputs = inputs.with_starts_as_decays()
    kind = inputs.v.dtype
    if kind.itemsize < 4:
        # No triangular solve is in half precision.
        inputs = inputs.to(torch.float32)
    log_decay = inputs.log_decay
    if log_decay is not None and log_decay.dim() == 3:
        log_decay = log_decay.unsqueeze(-1)
    extra = {"log_decay": log_decay, "erase": inputs.erase, "lookup": inputs.lookup}
    given = {name: tensor for name, tensor in extra.items() if tensor is not None}

    def read(
        weights: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor
    ) -> tuple[Tensor, Tensor]:
        return read_chunks(weights, q, k, v, **dict(zip(given, rest, strict=True)))

    tensors = [inputs.q, inputs.k, inputs.v, *given.values()]
    y, after = by_chunks(
        read, inputs.weights, tensors, inputs.chunking.size, inputs.chunking.recompute
    )
    return y.to(kind), after.to(kind)


def read_chunks(
    weights: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    erase: Tensor | None = None,
    lookup: Tensor | None = None,
    beta: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Read ``N`` chunks, ``[N, M, G, ...]``, after the memory ``[M, K, V]``: the outputs, and the
    memory after the last.

    Args:
        beta: ``[N, M, G, 1]``, the delta rule's, in place of ``erase`` and ``lookup``.
    """
    decay = decay_of(log_decay, k)
    scores = decay.gram(q, k)
    asking = decay.since(q)
    writing = decay.until(k)
    if beta is not None:
        return _scan(
            weights,
            decay,
            asking,
            found=_solve(decay.gram(k, k).tril(-1) * beta.mT, decay.since(k), -v),
            erasing=beta * writing,
            erasing_scores=scores * beta.mT,
        )
    written = writing.mT @ v
    own = scores @ v
    if erase is None or lookup is None:
        return _scan(weights, decay, asking, written, own)
    return _scan(
        weights,
        decay,
        asking,
        written,
        own,
        found=_solve(
            decay.gram(lookup, erase, 1), decay.since(lookup, 1), decay.gram(lookup, k, 1) @ v
        ),
        erasing=decay.until(erase),
        erasing_scores=decay.gram(q, erase),
    )


def _solve(mixing: Tensor, reading: Tensor, constant: Tensor) -> tuple[Tensor, Tensor]:
    """``(I + mixing)^-1`` times both."""
    both = torch.cat([reading, constant], -1)
    both = torch.linalg.solve_triangular(mixing, both, upper=False, unitriangular=True)
    reading, constant = both.split([reading.shape[-1], constant.shape[-1]], -1)
    return reading, constant


def _scan(
    weights: Tensor,
    decay: Decay,
    asking: Tensor,
    written: Tensor | None = None,
    own: Tensor | None = None,
    *,
    found: tuple[Tensor, Tensor] | None = None,
    erasing: Tensor | None = None,
    erasing_scores: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Go from chunk to chunk: ``R = F S + G`` for ``found`` ``(F, G)``, and the memory after it."""
    befores = []
    founds = []
    for n in range(len(asking)):
        befores.append(weights)
        after = decay.whole(n, weights)
        if written is not None:
            after = after + written[n]
        if found is not None:
            assert erasing is not None
            found_n = torch.baddbmm(found[1][n], found[0][n], weights)
            after = torch.baddbmm(after, erasing[n].mT, found_n, alpha=-1)
            founds.append(found_n)
        weights = after
    y = asking @ torch.stack(befores)
    if own is not None:
        y = y + own
    if erasing_scores is not None:
        y = y - erasing_scores @ torch.stack(founds)
    return y, weights


def decay_of(log_decay: Tensor | None, k: Tensor) -> Decay:
    """Decays from their logarithms, ``[N, M, G, 1]`` or ``[N, M, G, K]`` (None: nothing decays)."""
    if log_decay is None:
        return NoDecay()
    return HeadDecay(log_decay) if log_decay.shape[-1] == 1 else ChannelDecay(log_decay)
