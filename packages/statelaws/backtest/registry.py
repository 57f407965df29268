"""Makers of the models of bugs.toml, by bug."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Make = Callable[[], Any]
MODELS: dict[str, Callable[[], dict[str, Make]]] = {}
"""Each of a bug's models is checked."""
VOCABULARY = 64


def bug(name: str) -> Callable[[Callable[[], dict[str, Make]]], Any]:
    """Register a function that returns the makers of a bug's models."""

    def register(models: Callable[[], dict[str, Make]]) -> Any:
        MODELS[name] = models
        return models

    return register
