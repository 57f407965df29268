"""The cache of compiled code: what is loaded is what this user built, and what goes wrong is said."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from memspan.native import library

pytestmark = pytest.mark.skipif(
    os.name != "posix" or shutil.which(os.environ.get("CC", "cc")) is None, reason="no C compiler"
)
SOURCE = (
    "int answer(){return 42;} void prepare(){} void forward(){} void backward(){} void release(){}"
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, for C files that are compiled at once."""
    source = tmp_path / "small" / "compiled.c"
    source.parent.mkdir()
    source.write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(library, "FLAGS", ("-fPIC",))
    monkeypatch.setenv("MEMSPAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MEMSPAN_COMPILE", raising=False)
    monkeypatch.setattr(library, "functions", library.functions.__wrapped__)
    library._say.cache_clear()
    return tmp_path / "cache" / f"code-{os.geteuid()}"


def answer() -> int | None:
    code = library.functions(Path("small/compiled.c").resolve(), torch.float32, False)
    return None if code is None else code.answer()


def test_compiled_once_and_said(cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert answer() == 42
    assert "compiling small/compiled.c" in capfd.readouterr().err
    assert (cache.stat().st_mode & 0o777) == 0o700
    library._say.cache_clear()
    assert answer() == 42
    assert capfd.readouterr().err == ""


def _changed(path: Path) -> None:
    content = path.read_bytes()
    # In a new file: the old one is in use.
    path.unlink()
    path.write_bytes(content[:-1] + b"x")
    path.chmod(0o700)


@pytest.mark.parametrize(
    ("suffix", "damage"), [(".so", _changed), (".so", Path.unlink), (".sha256", Path.unlink)]
)
def test_altered_libraries_are_built_anew(
    cache: Path, suffix: str, damage: Callable[[Path], None]
) -> None:
    assert answer() == 42
    built = next(cache.glob("*.so")).read_bytes()
    damage(next(cache.glob(f"*{suffix}")))
    # What a killed compilation leaves.
    (cache / "tmpabc").mkdir()
    (cache / ".x.so.99.tmp").write_text("")
    assert answer() == 42
    assert next(cache.glob("*.so")).read_bytes() == built
    assert sorted(path.suffix for path in cache.iterdir()) == [".sha256", ".so"]


def test_nothing_of_the_current_folder_is_linked() -> None:
    """GNU's linker looks there first for what its own scripts name, such as libgcc_s.so.1."""
    Path("evil.c").write_text("int evil_is_linked(){return 1;}")
    subprocess.run(["cc", "-fPIC", "-c", "evil.c", "-o", "evil.o"], check=True)
    Path("libgcc_s.so.1").write_text(f"INPUT({Path('evil.o').resolve()})")
    code = library.functions(Path("small/compiled.c").resolve(), torch.float32, False)
    assert code is not None
    assert not hasattr(code, "evil_is_linked")


def _open_to_others(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)


def _of_another_user(cache: Path) -> None:
    cache.mkdir(parents=True, mode=0o700)
    if os.geteuid():
        pytest.skip("only root can give a folder away")
    os.chown(cache, 12345, -1)


def _a_link(cache: Path) -> None:
    (cache.parent / "elsewhere").mkdir(parents=True, mode=0o700)
    cache.symlink_to("elsewhere")


def _a_file(cache: Path) -> None:
    cache.parent.write_text("")


OWN_FOLDER = "set MEMSPAN_CACHE to a folder of your own"


@pytest.mark.parametrize(
    ("program", "spoil", "said"),
    [
        (None, _open_to_others, OWN_FOLDER),
        (None, _of_another_user, OWN_FOLDER),
        (None, _a_link, OWN_FOLDER),
        (None, _a_file, OWN_FOLDER),
        ("no-such-compiler", None, "there is no C compiler 'no-such-compiler'"),
        ("false", None, "false fails (status 1)"),
        ("true", None, "true fails (status 0)"),
    ],
)
def test_a_failed_build_is_reported_once_and_leaves_nothing(
    program: str | None,
    spoil: Callable[[Path], None] | None,
    said: str,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if program is not None:
        monkeypatch.setenv("CC", program)
    if spoil is not None:
        spoil(cache)
    assert answer() is None
    assert answer() is None
    (line,) = (line for line in capfd.readouterr().err.splitlines() if "compiling" not in line)
    assert said in line
    assert "several times slower" in line
    assert not cache.exists() or not list(cache.iterdir())
