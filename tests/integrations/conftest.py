"""All modules here need all extras: where a library is missing they are skipped, and say so."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest

LIBRARIES = {"datasets", "gymnasium", "lm_eval", "nbclient", "pyarrow", "torchrl", "transformers"}
MISSING = sorted(LIBRARIES - metadata.packages_distributions().keys())


class Module(pytest.Module):
    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        if MISSING:
            reason = f"needs {', '.join(MISSING)}: install the extra all, or run make test-all"
            pytest.skip(reason, allow_module_level=True)
        return super().collect()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    """One that is skipped before it is imported, which would fail."""
    return Module.from_parent(parent, path=module_path)
