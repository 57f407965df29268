"""Types checked at run time, one thread, reproducible draws."""

from __future__ import annotations

import os

# Before torch is imported, and for the processes that tests start: threads that wait for one another
# on few cores took half of the suite's time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import torch
from beartype import BeartypeConf
from beartype.claw import beartype_packages

# Breaks full-graph compilation, so compile tests run in a process of their own without it.
# jaxtyping's hook decorates method by method, where beartype knows no `Self`.
# Not options: they check themselves, and their messages are what users see.
FOLDERS = ("transformer_xl", "compressive", "feedback", "fast_weights")
OPTIONS = ("options", "registry", "initialisation", *(f"{folder}.config" for folder in FOLDERS))
CHECKED = BeartypeConf(claw_skip_package_names=tuple(f"memspan.models.{name}" for name in OPTIONS))
beartype_packages(("memspan.memory", "memspan.nn", "memspan.ops", "memspan.models"), conf=CHECKED)

torch.set_num_threads(1)

hypothesis.settings.register_profile(
    "default",
    deadline=None,
    max_examples=3,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "thorough", parent=hypothesis.settings.get_profile("default"), max_examples=60
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
