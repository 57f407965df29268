"""The libraries in C: which one is loaded, and what is said where one is missing or unusable."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

import memspan
from memspan.errors import MemspanError
from memspan.lab.cli import main
from memspan.models import Feedback, FeedbackConfig
from memspan.native import library, threads
from memspan.native.status import status
from memspan.ops.fast_weights import compiled as delta_rule_loop
from memspan.ops.fast_weights.rules import delta_rule

SOURCE = Path(memspan.__file__).parent / "ops" / "feedback" / "compiled.c"
needs_libraries = pytest.mark.skipif(library.missing() is not None, reason="no loops in C")


@pytest.fixture(autouse=True)
def loaded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("functions", "shares", "_say"):
        monkeypatch.setattr(library, name, getattr(library, name).__wrapped__)


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of that of the libraries."""
    monkeypatch.setattr(library, "BUILT", tmp_path)
    return tmp_path


def feedback_loops() -> object:
    return library.functions(SOURCE, torch.float32, False)


@pytest.mark.parametrize(
    ("capability", "level"),
    [("AVX512", "avx512"), ("AVX2", "avx2"), ("NO AVX", "baseline"), ("SVE256", "baseline")],
)
def test_the_level_follows_torchs(
    capability: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert library.level() == level


@needs_libraries
@pytest.mark.parametrize("level", ["avx512", "avx2"])
def test_the_level_below_serves_what_a_level_does_not_have(
    level: str, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (built / level).mkdir()
    (built / "baseline").mkdir()
    real = Path(library.__file__).parent / "built" / "baseline" / "feedback-float.so"
    (built / "baseline" / real.name).write_bytes(real.read_bytes())
    monkeypatch.setattr(library, "level", lambda: level)
    assert feedback_loops() is not None


def _levels_here() -> list[str]:
    """Folders of libraries that this processor runs."""
    folders = ["baseline", "avx2", "avx512"]
    below = folders[: folders.index(library.level()) + 1]
    return [name for name in below if (library.BUILT / name).is_dir()]


@pytest.mark.parametrize("level", _levels_here())
@pytest.mark.parametrize("log_decay", [None, -torch.rand(2, 2, 70)])
def test_every_level_agrees_with_the_reference(
    level: str, log_decay: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "level", lambda: level)
    q, k = torch.nn.functional.normalize(torch.randn(2, 2, 2, 70, 24), dim=-1)
    v = torch.randn(2, 2, 70, 20)
    beta = torch.rand(2, 2, 70)
    given = (q, k, v, beta, torch.randn(2, 2, 24, 20))
    results = [
        delta_rule(*given, log_decay=log_decay, implementation=implementation)
        for implementation in ("reference", "compiled")
    ]
    for expected, result in zip(*results, strict=True):
        torch.testing.assert_close(result, expected)


def test_without_libraries_nothing_is_said(built: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """PyTorch serves, and asking for the compiled loop says where to look."""
    assert not delta_rule_loop.available(torch.zeros(()))
    model = Feedback(FeedbackConfig(n_layers=1, d_model=8, n_heads=2, d_ff=8))
    x = torch.randn(2, 3, 8)
    assert torch.equal(model(x).hidden, model(x, implementation="fused").hidden)
    with pytest.raises(MemspanError, match=r"needs a CPU.* loops in C.*memspan --version.*fused"):
        model(x, implementation="compiled")
    (built / "missing.txt").write_text("no C compiler\n")
    assert status().startswith(
        "loops in C: none, since memspan was installed without them (no C compiler). PyTorch's loops"
    )
    assert capfd.readouterr().err == ""


@needs_libraries
@pytest.mark.parametrize("damage", ["empty", "text", "another machine's"])
def test_an_unusable_library_is_reported(
    damage: str, built: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = built / library.level() / "feedback-float.so"
    path.parent.mkdir()
    if damage == "another machine's":
        content = bytearray((Path(library.__file__).parent / "built" / "shares.so").read_bytes())
        # The machine in an ELF header, and the processor in a Mach-O's.
        content[18] ^= 0x55
        content[4] ^= 0x03
        path.write_bytes(content)
    else:
        path.write_text("" if damage == "empty" else "not a library")
    assert feedback_loops() is None
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "the loops in C cannot be loaded" in said
    assert library.REMEDY in said


@needs_libraries
def test_the_version_comes_with_level_and_threads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(library, "level", lambda: "avx2")
    monkeypatch.setattr(threads, "_parallel", lambda: (os.getpid(), 1))
    main(["--version"])
    version, loops = capsys.readouterr().out.splitlines()
    assert version == f"memspan {memspan.__version__}"
    assert loops == "loops in C: avx2, the threads of PyTorch's OpenMP"
    monkeypatch.setattr(threads, "_parallel", lambda: (os.getpid(), None))
    assert status() == "loops in C: avx2, one thread"


@needs_libraries
def test_nothing_is_written_beside_the_libraries(built: Path) -> None:
    """They may lie on a file system that is read-only, or shared by different processors."""
    shutil.copytree(Path(library.__file__).parent / "built", built, dirs_exist_ok=True)
    before = sorted(built.rglob("*"))
    for path in [built, *before]:
        path.chmod(0o555)
    assert feedback_loops() is not None
    assert library.shares() is not None
    assert sorted(built.rglob("*")) == before
