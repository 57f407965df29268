"""Install memspan and statelaws as users do, and try each alone where no checkout is near.

    python tests/installed.py DIST        (`make package` builds their wheels and sdists in dist first)

In environments of their own, with the versions of constraints.txt. Not a part of the tests: it installs
torch, and needs a network or pip's cache.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PINS = ROOT / "constraints.txt"
TEXT = "memory is what remains of what was read. " * 300
SMALL = (
    *("--data.corpus", "text.txt", "--train.steps", "2", "--train.batch-size", "2"),
    *("--train.evaluate-tokens", "64", "--train.sample-tokens", "4"),
)
TESTS = ("tests/test_package.py", "tests/models/test_memory.py", "tests/runs/test_shipped.py")
"""Tests of memspan's sdist that are run: some seconds, with nothing but what TOOLS names."""
TOOLS = ("pytest", "pytest-xdist", "hypothesis")


class Environment:
    """A virtual environment in ``folder``, and an empty folder beside it to work in."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder / "env", with_pip=True)
        self.programs = folder / "env" / ("Scripts" if os.name == "nt" else "bin")
        self.work = folder / "work"
        self.work.mkdir()
        # One thread: on busy cores, several wait for one another.
        own = {"MEMSPAN_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
        self.variables = os.environ | own
        self.variables.pop("PYTHONPATH", None)
        self.variables.pop("CC", None)
        if os.name == "posix":
            # No compiler, nor anything else of the system's.
            self.variables["PATH"] = str(self.programs)

    def run(self, *words: str, status: int = 0, folder: Path | None = None) -> str:
        """Output of a program of the environment; fails unless it ends with ``status``."""
        print("   ", *words, flush=True)
        done = subprocess.run(
            [shutil.which(words[0], path=str(self.programs)) or words[0], *words[1:]],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            cwd=folder or self.work,
            env=self.variables,
        )
        assert done.returncode == status, f"{done.stdout}\nstatus {done.returncode}, not {status}"
        return done.stdout

    def install(self, *what: str, compiler: bool = False) -> None:
        """Install packages, in the versions of constraints.txt."""
        with_pip = ("python", "-m", "pip", "install", "--quiet", "-c", str(PINS))
        path = self.variables["PATH"]
        if compiler:
            self.variables["PATH"] = os.environ["PATH"]
        self.run(*with_pip, *what)
        self.variables["PATH"] = path


def try_statelaws(env: Environment, dist: Path) -> None:
    """Try statelaws without memspan: its command, and all its tests."""
    wheel, sdist = files_of("statelaws", dist)
    check_files(wheel, ROOT / "packages" / "statelaws" / "src")
    env.install(str(wheel))
    env.run("python", "-c", "import memspan", status=1)
    name = env.run("statelaws", "--version").strip().replace(" ", "-")
    assert wheel.name.startswith(f"{name}-")
    (env.work / "mine.py").write_text("import torch\n\ncell = torch.nn.GRU(8, 16)\n")
    assert "cuts           holds" in env.run("statelaws", "check", "mine.py:cell")
    refusal = env.run("statelaws", "check", "transformers:mamba", status=2)
    assert "pip install 'transformers" in refusal
    try_tests(env, sdist, "tests")


def try_memspan(env: Environment, dist: Path) -> None:
    """Try memspan without statelaws, and then with it."""
    wheel, sdist = files_of("memspan", dist)
    check_files(wheel, ROOT / "src")
    env.install(str(wheel))
    where = env.run("python", "-c", "import memspan; print(memspan.__file__)")
    assert str(env.programs.parent) in where
    assert "generate RUN" in env.run("memspan", "--help")
    name, loops = env.run("memspan", "--version").splitlines()
    assert wheel.name.startswith(f"{name.replace(' ', '-')}-")
    print("       ", loops)
    assert loops.startswith("loops in C: none") == wheel.name.endswith("-any.whl")
    assert not (wheel.name.endswith("-any.whl") and sys.platform == "linux")
    (env.work / "text.txt").write_text(TEXT)
    refusal = env.run("memspan", "train", "--preset", "?", status=2)
    presets = re.findall(r"tiny-[\w-]+", refusal)
    assert len(presets) > 3, refusal
    for preset in presets:
        env.run("memspan", "train", "--preset", preset, *SMALL)
    if "none" not in loops:
        states = [path.read_text() for path in env.work.rglob("state.json")]
        assert any('"compiled loops": true' in state for state in states)
        assert not any('"compiled loops": false' in state for state in states)
    program = "import memspan; print(memspan.load('shakespeare').step)"
    assert int(env.run("python", "-c", program)) > 0
    assert len(env.run("memspan", "generate", "shakespeare", "--tokens", "20")) > 10
    assert "span" in env.run("memspan", "measure", "shakespeare", "--budget", "5")
    assert (env.work / "measure.json").is_file()
    for verb in ("check", "measure"):
        refusal = env.run("memspan", verb, "tiny-shakespeare", status=2)
        assert "statelaws is not installed: pip install ./packages/statelaws" in refusal
    env.install(str(files_of("statelaws", dist)[0]))
    # A token of the first is read by the step in C, a segment of the others by loops in C.
    for name in ("", "-feedback", "-fast-weights", "-gated-delta-net"):
        assert "files          holds" in env.run("memspan", "check", f"shakespeare{name}")
    try_tests(env, sdist, *TESTS)
    assert "loops in C: none" not in env.run("memspan", "--version")
    if os.name == "posix":
        env.install("--no-deps", "--force-reinstall", "--no-cache-dir", str(sdist))
        assert "without them (no C compiler)" in env.run("memspan", "--version")
        assert len(env.run("memspan", "generate", "shakespeare", "--tokens", "20")) > 10


def files_of(name: str, dist: Path) -> list[Path]:
    """The wheel and the sdist of a distribution."""
    found = [list(dist.glob(f"{name}-*{kind}")) for kind in (".whl", ".tar.gz")]
    return [path.resolve() for (path,) in found]


def check_files(wheel: Path, source: Path) -> None:
    """Fail unless the wheel has every file of the package in ``source``, the libraries included."""
    files = [path for path in source.rglob("*") if path.is_file()]
    ours = {path.relative_to(source).as_posix() for path in files}
    missing = ours - set(zipfile.ZipFile(wheel).namelist())
    assert all("__pycache__" in name for name in missing), missing


def try_tests(env: Environment, sdist: Path, *tests: str) -> None:
    """Install from an sdist in place of the wheel, and run tests that it brings."""
    with tarfile.open(sdist) as archive:
        archive.extractall(env.work, filter="data")
    env.install("--no-deps", "--force-reinstall", str(sdist), compiler=True)
    env.install(*TOOLS)
    folder = env.work / sdist.name.removesuffix(".tar.gz")
    print(env.run("python", "-m", "pytest", "-q", *tests, folder=folder).splitlines()[-1])


def main() -> None:
    """Try what is in the folder that the command line names."""
    dist = Path(sys.argv[1])
    for attempt in (try_statelaws, try_memspan):
        with tempfile.TemporaryDirectory(prefix="memspan-", ignore_cleanup_errors=True) as folder:
            attempt(Environment(Path(folder)), dist)
    print("both work")


if __name__ == "__main__":
    main()
