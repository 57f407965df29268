"""Types checked at run time, one thread, reproducible draws."""

from __future__ import annotations

import os

if not os.environ.get("MEMSPAN_NO_HOOK"):
    # Breaks full-graph compilation, so compile tests run in a process of their own without it.
    # jaxtyping's hook decorates method by method, where beartype knows no `Self`.
    from beartype.claw import beartype_packages

    beartype_packages(("memspan.memory", "memspan.nn", "memspan.ops", "memspan.models"))

import hypothesis
import torch

torch.set_num_threads(1)

hypothesis.settings.register_profile(
    "default",
    deadline=None,
    max_examples=8,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile("thorough", parent=hypothesis.settings.get_profile("default"))
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
