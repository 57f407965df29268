"""``hatch_build.py``: what is compiled, for which platforms, and what is said where it cannot be."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import hatch_build
import pytest

needs_a_compiler = pytest.mark.skipif(
    os.name != "posix" or shutil.which("cc") is None, reason="no C compiler"
)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of one small operation."""
    for name, text in [
        ("native/shares.c", "int in_shares(void){return 1;}"),
        ("native/common.h", ""),
        ("ops/small/compiled.c", "int answer(void){return 42;}"),
    ]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.delenv("CC", raising=False)
    return tmp_path


def built(package: Path) -> set[str]:
    folder = package / hatch_build.BUILT
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@needs_a_compiler
def test_changed_sources_are_built_again(package: Path) -> None:
    assert hatch_build.stale(package)
    paths = hatch_build.build(package)
    assert all(path.is_file() for path in paths)
    assert len(built(package)) == len(paths) + 1
    assert not hatch_build.stale(package)
    (package / "ops" / "small" / "compiled.c").write_text("int answer(void){return 43;}")
    assert hatch_build.stale(package)
    before = {path: path.stat().st_ino for path in paths}
    (package / hatch_build.BUILT / "left.so").write_text("")
    hatch_build.build(package)
    changed = {path.name for path in paths if path.stat().st_ino != before[path]}
    assert changed == {"small-float.so", "small-double.so"}
    assert "left.so" not in built(package)


@needs_a_compiler
@pytest.mark.parametrize(
    ("compiler", "source", "reason"),
    [
        ("no-such-compiler -O2", "", "no C compiler 'no-such-compiler'"),
        ("cc", "int answer(void){return x;}", "cc fails for .*/small-.*error: .x. undeclared"),
    ],
)
def test_a_build_that_fails_leaves_the_reason_alone(
    compiler: str, source: str, reason: str, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hatch_build.build(package)
    (package / "ops" / "small" / "compiled.c").write_text(source)
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(hatch_build.BuildError, match=reason) as raised:
        hatch_build.build(package)
    assert built(package) == {hatch_build.MISSING}
    kept = (package / hatch_build.BUILT / hatch_build.MISSING).read_text()
    assert kept == f"{raised.value}\n"
    assert not hatch_build.stale(package)


@needs_a_compiler
def test_nothing_of_the_current_folder_is_linked(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GNU's linker looks there first for what its own scripts name, such as libgcc_s.so.1."""
    folder = package / "here"
    folder.mkdir()
    (folder / "libgcc_s.so.1").write_text("neither a library nor a script")
    monkeypatch.chdir(folder)
    hatch_build.build(package)


@pytest.mark.parametrize(
    ("host", "content", "tag"),
    [
        ("linux-x86_64", b"GLIBC_2.2.5\0GLIBC_2.35\0GLIBC_2.4", "manylinux_2_35_x86_64"),
        ("linux-aarch64", b"GLIBC_2.17", "manylinux_2_28_aarch64"),
        ("linux-x86_64", b"no versions, as musl has them", "linux_x86_64"),
        ("macosx-14.0-arm64", b"", "macosx_11_0_arm64"),
        ("win-amd64", b"", "win_amd64"),
    ],
)
def test_a_wheels_platform_is_where_its_libraries_run(
    host: str, content: bytes, tag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hatch_build.sysconfig, "get_platform", lambda: host)
    (tmp_path / "a.so").write_bytes(content)
    assert hatch_build.platform_tag([tmp_path / "a.so"]) == tag


@pytest.mark.parametrize(
    ("host", "levels"),
    [
        ("linux-x86_64", {"baseline", "avx2", "avx512"}),
        ("win-amd64", {"baseline", "avx2", "avx512"}),
        ("linux-aarch64", {"baseline"}),
        ("macosx-11.0-arm64", {"baseline"}),
    ],
)
def test_the_levels_of_a_platform(
    host: str, levels: set[str], package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hatch_build.sysconfig, "get_platform", lambda: host)
    names = [library.name for library in hatch_build.libraries(package)]
    assert {Path(name).parent.name for name in names} - {""} == levels


def test_loops_are_not_built_for_a_level_that_slows_them(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hatch_build.sysconfig, "get_platform", lambda: "linux-x86_64")
    monkeypatch.setattr(hatch_build, "SLOWER", {("avx512", "small")})
    names = {library.name for library in hatch_build.libraries(package)}
    assert "avx2/small-float.so" in names
    assert "avx512/small-float.so" not in names


@pytest.mark.parametrize(
    ("version", "fails", "data"),
    [
        ("standard", False, {"pure_python": False, "tag": "py3-none-any_system"}),
        ("editable", False, {}),
        ("standard", True, {}),
    ],
)
def test_the_hook_tags_wheels_with_libraries(
    version: str, fails: bool, data: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> list[Path]:
        if fails:
            raise hatch_build.BuildError("no C compiler")
        return []

    warned: list[str] = []
    app = type("App", (), {"display_warning": staticmethod(warned.append)})
    hook = object.__new__(hatch_build.NativeHook)
    monkeypatch.setattr(hatch_build.NativeHook, "app", app, raising=False)
    monkeypatch.setattr(hatch_build, "build", build)
    monkeypatch.setattr(hatch_build, "platform_tag", lambda paths: "any_system")
    given: dict[str, Any] = {"artifacts": []}
    hook.initialize(version, given)
    assert given == {"artifacts": ["/src/memspan/native/built/"], **data}
    assert warned == ["memspan is built without its loops in C, slower: no C compiler"] * fails
