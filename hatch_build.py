"""Compile the C of memspan: hatchling runs this when it builds a wheel or an editable install.

    python hatch_build.py        compiles in a checkout what has changed, as does `make native`

``CC`` names the compiler, with any arguments; without it cc, gcc or clang is taken. For another
machine, ``_PYTHON_HOST_PLATFORM`` names its platform, such as linux-aarch64, and ``CC`` a compiler for
it.

The libraries need neither Python nor PyTorch, so a wheel serves all versions of both.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:
    # Nothing but the hook needs it.
    BuildHookInterface = object

PACKAGE = Path(__file__).parent / "src" / "memspan"
BUILT = Path("native", "built")
DIGESTS = "digests.json"
"""Digests of each library's sources and flags."""
MISSING = "missing.txt"
"""Why there are no libraries."""
# NaN and infinity must stay what they are.
KERNEL_FLAGS = ("-O3", "-ffast-math", "-fno-finite-math-only")
# What PyTorch asks a processor and its operating system for, before it uses its own code of that name.
LEVELS = {
    "baseline": (),
    "avx2": ("-mavx2", "-mfma"),
    "avx512": ("-mavx2", "-mfma", "-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq"),
}
# Loops that a level makes slower: those of the level below serve. On an AMD EPYC of the fourth
# generation AVX-512 costs the Feedback Transformer's steps, short vectors with remainders, 5 to 8 %.
SLOWER = {("avx512", "feedback")}
NUMBERS = {
    "float": ("-DREAL=float",),
    "double": ("-DREAL=double",),
    "bfloat16": ("-DREAL=float", "-DBFLOAT16"),
}
# PyTorch's wheels need macOS 11 and, on Linux, this version of glibc.
MACOS = "11.0"
GLIBC = 28


class BuildError(Exception):
    """The C cannot be compiled; says why."""


class Library:
    """A library to be built of one C file and its headers.

    Args:
        name: its file below ``native/built``.
        source: the C file.
        headers: folders of the headers.
        flags: of the compiler.
    """

    def __init__(
        self, name: str, source: Path, headers: list[Path], flags: tuple[str, ...]
    ) -> None:
        self.name = name
        self.source = source
        self.headers = headers
        self.flags = flags

    def digest(self) -> str:
        """A hash of all that the library is made of, but for the compiler."""
        files = [self.source, *(f for folder in self.headers for f in sorted(folder.glob("*.h")))]
        texts = [file.read_text(encoding="utf-8") for file in files]
        return hashlib.sha256(repr((texts, self.flags)).encode()).hexdigest()

    def build(self, compiler: list[str], path: Path) -> None:
        """Compile it to ``path``.

        Raises:
            BuildError: the compiler fails.
        """
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder, "object.o")
            linked = Path(folder, path.name)
            includes = [f"-I{folder}" for folder in self.headers]
            compiling = [*compiler, *self.flags, *includes, "-c", str(self.source), "-o", str(made)]
            # In two steps: linking with -ffast-math would change arithmetic in the whole process.
            linking = [*compiler, *_target_flags(), "-shared", str(made), "-o", str(linked)]
            linking += [] if _platform().startswith("win") else ["-lm"]
            for command in (compiling, linking):
                # Not in the current folder: linkers take a libgcc_s.so.1 that lies there.
                done = subprocess.run(command, cwd=folder, capture_output=True)
                if done.returncode:
                    said = done.stderr.decode(errors="replace").strip().splitlines()
                    reason = next((line for line in said if "error" in line), f"{said[-1:]}")
                    raise BuildError(f"{shlex.join(compiler)} fails for {self.name}: {reason}")
            # Programs may be using the old one.
            os.replace(linked, path)


def libraries(package: Path) -> list[Library]:
    """All libraries of the package in a folder."""
    native = package / "native"
    common = (*_target_flags(), "-Wno-psabi")
    on_x86 = _platform().endswith(("x86_64", "amd64"))
    found = [Library("shares.so", native / "shares.c", [native], (*common, "-O2"))]
    for level, level_flags in LEVELS.items() if on_x86 else [("baseline", ())]:
        for source in sorted(package.glob("ops/*/compiled.c")):
            if (level, source.parent.name) in SLOWER:
                continue
            headers = [source.parent, native]
            for number, number_flags in NUMBERS.items():
                # Weights are in bfloat16 in stacks alone.
                if number == "bfloat16" and "stack.h" not in source.read_text(encoding="utf-8"):
                    continue
                name = f"{level}/{source.parent.name}-{number}.so"
                flags = (*common, *KERNEL_FLAGS, *level_flags, *number_flags)
                found.append(Library(name, source, headers, flags))
    return found


def build(package: Path = PACKAGE) -> list[Path]:
    """Compile what is missing or not of today's sources, remove what is not wanted; all libraries.

    Raises:
        BuildError: there is no compiler, or it fails. Then there are no libraries, and a file says why.
    """
    built = package / BUILT
    wanted = {library.name: library for library in libraries(package)}
    digests = {name: library.digest() for name, library in wanted.items()}
    known = _recorded(built)
    old = [
        name for name in wanted if digests[name] != known.get(name) or not (built / name).exists()
    ]
    try:
        if old:
            compiler = _compiler()
            for name in old:
                (built / name).parent.mkdir(parents=True, exist_ok=True)
            with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
                list(threads.map(lambda name: wanted[name].build(compiler, built / name), old))
    except BuildError as error:
        shutil.rmtree(built, ignore_errors=True)
        built.mkdir(parents=True)
        (built / MISSING).write_text(f"{error}\n", encoding="utf-8")
        raise
    paths = [built / name for name in wanted]
    for path in built.rglob("*"):
        if path.is_file() and path not in paths:
            path.unlink()
    (built / DIGESTS).write_text(json.dumps(digests, indent=1), encoding="utf-8")
    return paths


def stale(package: Path = PACKAGE) -> bool:
    """True if libraries are not of today's sources, though they could be built."""
    if (package / BUILT / MISSING).exists():
        return False
    return _recorded(package / BUILT) != {x.name: x.digest() for x in libraries(package)}


def platform_tag(paths: list[Path]) -> str:
    """The platform of a wheel with these libraries; on Linux, with the oldest glibc for them."""
    name = re.sub(r"\W", "_", _platform())
    if not name.startswith("linux"):
        return name
    minors = re.findall(rb"GLIBC_2\.(\d+)", b"".join(path.read_bytes() for path in paths))
    # musl's libraries have no versions.
    return (
        f"many{name}".replace("linux", f"linux_2_{max(GLIBC, *map(int, minors))}")
        if minors
        else name
    )


def _recorded(built: Path) -> dict[str, str]:
    try:
        return dict(json.loads((built / DIGESTS).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _platform() -> str:
    """Such as linux-x86_64, macosx-11.0-arm64 or win-amd64."""
    name = sysconfig.get_platform()
    if not name.startswith("macosx"):
        return name
    # Pythons for two processors build for the one that they run on.
    machine = name.rsplit("-", 1)[1].replace("universal2", platform.machine())
    return f"macosx-{MACOS}-{machine}"


def _target_flags() -> tuple[str, ...]:
    if _platform().startswith("win"):
        return ()
    return ("-fPIC", *[f"-mmacosx-version-min={MACOS}"] * _platform().startswith("macosx"))


def _compiler() -> list[str]:
    named = shlex.split(os.environ.get("CC", ""), posix=os.name == "posix")
    for command in [named] if named else [["cc"], ["gcc"], ["clang"]]:
        program = shutil.which(command[0])
        if program:
            return [os.path.abspath(program), *command[1:]]
    raise BuildError(f"no C compiler {named[0]!r}" if named else "no C compiler")


class NativeHook(BuildHookInterface):  # type: ignore[misc]
    """Adds the libraries to a wheel, or says why it has none."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build them in the source folder, where an editable install finds them."""
        build_data["artifacts"].append(f"/src/memspan/{BUILT.as_posix()}/")
        try:
            paths = build()
        except BuildError as error:
            self.app.display_warning(f"memspan is built without its loops in C, slower: {error}")
            return
        if version != "editable":
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform_tag(paths)}"


if __name__ == "__main__":
    try:
        build()
    except BuildError as failure:
        print(f"built without the loops in C: {failure}", file=sys.stderr)
