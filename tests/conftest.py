"""One thread, reproducible draws, folders of a test's own."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported, and for the processes that tests start: threads that wait for one another
# on few cores took half of the suite's time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hatch_build
import hypothesis
import pytest
import torch

import architectures
import device
import memspan
import tiny_runs
from memspan.lab.training import metrics
from memspan.models.registry import MODELS

torch.set_num_threads(1)
if device.CHOSEN is not None:
    device.run_tests_on(device.CHOSEN)
# A shell ignores interrupts in what it starts in the background, nohup hang-ups; tests need both.
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
# No power is cut here, so nothing has to reach the disk.
os.fsync = lambda descriptor: None

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


def pytest_sessionstart() -> None:
    """Refuse to test old C."""
    if hatch_build.stale(Path(memspan.__file__).parent):
        pytest.exit("the C has changed since it was compiled: make native", returncode=2)


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """A test draws the same numbers alone, in another order and among other workers."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def gradients_stay_on() -> Iterator[None]:
    """Scripts of ``memspan check`` turn them off, and are run by tests."""
    yield
    assert torch.is_grad_enabled()


@pytest.fixture(autouse=True)
def shared_models_stay() -> Iterator[None]:
    """Named by the test that changes one, not by another that comes upon it later."""
    yield
    architectures.shared_models_are_back()


@pytest.fixture
def own_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Path:
    """A cache, a working folder and a ``sys.path`` of the test's own; no plots unless it is marked
    ``plots``."""
    monkeypatch.setenv("MEMSPAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    if request.node.get_closest_marker("plots") is None:
        monkeypatch.setattr(metrics, "plot", lambda *_: [])
    return tmp_path


@pytest.fixture
def one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make one round of each of ``memspan measure``'s measurements: no test depends on time."""
    for most in ("span.MOST_TARGETS", "repeats.MOST_STRINGS", "inside.MOST_TOKENS"):
        monkeypatch.setattr(f"memspan.lab.measurement.{most}", 1)


@pytest.fixture
def tiny_text(own_folders: Path) -> None:
    """Text of the runs of ``tiny_runs``, in a folder of the test's own."""
    Path("text.txt").write_text(tiny_runs.TEXT)


@pytest.fixture
def own_architectures() -> Iterator[None]:
    """Forget after a test the modules of ``examples`` and architectures that it imported."""
    registered = dict(MODELS)
    yield
    MODELS.clear()
    MODELS.update(registered)
    for name in ("own_architecture", "installed_package"):
        sys.modules.pop(name, None)


# Before xdist looks at the groups.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests that start processes first, in one worker: what they are forks of starts once."""
    items.sort(key=lambda item: item.get_closest_marker("processes") is None)
    for item in items:
        if item.get_closest_marker("processes") is not None:
            item.add_marker(pytest.mark.xdist_group("processes"))
