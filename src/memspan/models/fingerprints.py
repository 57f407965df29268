"""A model's fingerprint, which its memories carry: a hash of everything its function depends on."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

from memspan.models.options import BackboneConfig, EmbeddingConfig


def fingerprint(backbone: BackboneConfig, embedding: EmbeddingConfig, weights: str) -> str:
    """The fingerprint of a model with these options: 64 hexadecimal digits.

    An option counts by name, and only where it differs from its default, so that one more leaves all
    fingerprints as they are; a default must never change. Options in ``same_function`` do not count.
    ``weights``: their digest.
    """
    options = _counted("model", backbone) | _counted("embedding", embedding)
    named = [f"{name}={value!r}" for name, value in sorted(options.items())]
    text = "\n".join([type(backbone).__name__, *named, weights])
    return hashlib.sha256(text.encode()).hexdigest()


def _counted(section: str, config: Any) -> dict[str, object]:
    """The options that change the function and are not at their defaults."""
    return {
        f"{section}.{field.name}": value
        for field in dataclasses.fields(config)
        if field.name not in config.same_function
        and (value := getattr(config, field.name)) != field.default
    }
