"""Initial values of parameters.

``papers``: matrices and tables from N(0, 0.02^2) whatever their size, as in the papers' code; it fits
widths near 500 to 1,000. ``scaled``: N(0, (f / sqrt(n))^2), where n is the number of terms that one
output sums over, so that activations begin alike at every width, and f depends on what the parameter
is for (:data:`FACTORS`; docs/initialisation.md says how they were found); all biases 0, except
that an LSTM's forget gates begin open. In both, gains of norms begin at 1 and compression functions as
mean pooling.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, get_args

from torch import Tensor, nn

from memspan.errors import MemspanError

Scheme = Literal["scaled", "papers"]
PAPERS_STD = 0.02
FACTORS = {
    "projection": 1.0,
    "query-key": 0.5,
    "value": 1.0,
    "beta": 1.0,
    "residual": 1.0,
    "embedding": 0.5,
    "position": 1.0,
    "position-key": 1.0,
    "position-score": 0.0,
}
"""The factor f, by kind of parameter."""
KINDS = {
    "query-key": r"(^|\.)(query|key)(\.\d+)?\.weight$",
    "value": r"(^|\.)value(\.\d+)?\.weight$",
    "beta": r"(^|\.)beta\.weight$",
    "residual": r"(^|\.)(output|outer)\.weight$",
    "embedding": r"(^|\.)(tables\.\d+|cluster_weight)$",
    "position": r"(^|\.)position\.weight$",
    "position-key": r"(^|\.)position_keys$",
    "position-score": r"(^|\.)position_scores$",
    "bias": r"bias(_[ih]h_l0)?$",
}
"""Names of each kind's parameters. Other matrices are projections; other vectors stay as made."""


def initialise(
    module: nn.Module,
    scheme: Scheme,
    n_layers: int = 1,
    factors: Mapping[str, float] | None = None,
) -> None:
    """Draw the parameters of ``module`` from torch's global generator, in their order.

    Args:
        n_layers: of the backbone. What its 2 ``n_layers`` branches add to the residual stream then has
            a variance of about 1 together (as in GPT-2, Radford et al. 2019).
        factors: those that differ from :data:`FACTORS`.

    Raises:
        MemspanError: there is no such scheme.
    """
    if scheme not in get_args(Scheme):
        raise MemspanError(f"no initialisation {scheme!r}: use {' or '.join(get_args(Scheme))}")
    for name, parameter in _in_order(module):
        if parameter.is_meta:
            # Shapes alone. Drawing them would import torch's compiler, which takes a second.
            continue
        if scheme == "papers" and parameter.dim() >= 2:
            nn.init.normal_(parameter, std=PAPERS_STD)
        elif kind(name) == "bias":
            nn.init.zeros_(parameter)
        elif parameter.dim() >= 2:
            nn.init.normal_(parameter, std=_std(name, parameter, n_layers, factors or {}))


def _in_order(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Order parameters as they are drawn: as they are named, but the biases of relative attention come
    first, and a layer's compression comes after the rest of the layer."""
    named = list(module.named_parameters())
    ends = {_layer(name): n for n, (name, _) in enumerate(named)}

    def place(n: int) -> float:
        part = named[n][0].rpartition(".attention.")[2]
        if part in ("content_bias", "position_bias"):
            return -2 if part == "content_bias" else -1
        return ends[_layer(named[n][0])] + 0.5 if part.startswith("compression.") else n

    return [named[n] for n in sorted(range(len(named)), key=place)]


def _layer(name: str) -> str:
    """The layer in a parameter's name, such as ``layers.2``; empty where it is in none."""
    found = re.match(r"(.*\.)?layers\.\d+", name)
    return found[0] if found else ""


def kind(name: str) -> str:
    """The role of a parameter of this name."""
    return next((of for of, names in KINDS.items() if re.search(names, name)), "projection")


def _std(name: str, parameter: Tensor, n_layers: int, factors: Mapping[str, float]) -> float:
    of_kind = kind(name)
    terms = float(parameter.shape[-1])
    if of_kind == "residual":
        terms *= 2 * n_layers
    elif of_kind == "position":
        # The mean square of the sinusoids that it projects.
        terms /= 2
    elif of_kind in ("position-key", "position-score"):
        # They stand beside what is projected already.
        terms = 1
    return (FACTORS | dict(factors))[of_kind] / terms**0.5
