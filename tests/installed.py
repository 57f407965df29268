"""Install the wheel and the sdist as users do, and try them where no checkout is near.

    python tests/installed.py DIST        (`make package` builds both in dist first)

In an environment of its own, with the versions of constraints.txt. Not a part of the tests: it installs
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
"""Those of the sdist's tests that are run: some seconds, with nothing but what TOOLS names."""
TOOLS = ("pytest", "pytest-xdist", "hypothesis")


class Environment:
    """A virtual environment in ``folder``, and an empty folder beside it to work in."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder / "env", with_pip=True)
        self.programs = folder / "env" / ("Scripts" if os.name == "nt" else "bin")
        self.work = folder / "work"
        self.work.mkdir()
        # A cache of its own: nothing is compiled yet. One thread: on busy cores, several wait for
        # one another.
        own = {"MEMSPAN_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
        self.variables = os.environ | own
        self.variables.pop("PYTHONPATH", None)

    def run(self, *words: str, status: int = 0, folder: Path | None = None) -> str:
        """What a program of the environment prints; fails unless it ends with ``status``."""
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

    def install(self, *what: str) -> None:
        """Install packages, in the versions of constraints.txt."""
        self.run("python", "-m", "pip", "install", "--quiet", "-c", str(PINS), *what)


def try_wheel(env: Environment, wheel: Path) -> None:
    """It has every file of the package; help, presets, the loops in C, and the trained runs work."""
    files = (ROOT / "src" / "memspan").rglob("*")
    ours = {p.relative_to(ROOT / "src").as_posix() for p in files if p.is_file()}
    missing = ours - set(zipfile.ZipFile(wheel).namelist())
    assert all("__pycache__" in name for name in missing), missing
    env.install(str(wheel))
    where = env.run("python", "-c", "import memspan; print(memspan.__file__)")
    assert str(env.programs.parent) in where
    assert "generate RUN" in env.run("memspan", "--help")
    name = env.run("memspan", "--version").strip().replace(" ", "-")
    assert wheel.name.startswith(f"{name}-")
    (env.work / "text.txt").write_text(TEXT)
    refusal = env.run("memspan", "train", "--preset", "?", status=2)
    presets = re.findall(r"tiny-[\w-]+", refusal)
    assert len(presets) > 3, refusal
    printed = "".join(env.run("memspan", "train", "--preset", p, *SMALL) for p in presets)
    if shutil.which(os.environ.get("CC", "cc")):
        for loop in ("fast_weights", "feedback"):
            assert printed.count(f"compiling {loop}/compiled.c") == 1
    program = "import memspan; print(memspan.load('shakespeare').step)"
    assert int(env.run("python", "-c", program)) > 0
    assert len(env.run("memspan", "generate", "shakespeare", "--tokens", "20")) > 10
    assert "span" in env.run("memspan", "measure", "shakespeare", "--budget", "5")
    assert (env.work / "measure.json").is_file()


def try_sdist(env: Environment, sdist: Path) -> None:
    """It builds the same package, and brings its tests."""
    with tarfile.open(sdist) as archive:
        archive.extractall(env.work, filter="data")
    env.install("--no-deps", "--force-reinstall", str(sdist))
    env.install(*TOOLS)
    folder = env.work / sdist.name.removesuffix(".tar.gz")
    print(env.run("python", "-m", "pytest", "-q", *TESTS, folder=folder).splitlines()[-1])


def main() -> None:
    """Try both files of the folder that the command line names."""
    dist = Path(sys.argv[1])
    (wheel,), (sdist,) = (list(dist.glob(f"memspan-*{kind}")) for kind in (".whl", ".tar.gz"))
    with tempfile.TemporaryDirectory(prefix="memspan-", ignore_cleanup_errors=True) as folder:
        env = Environment(Path(folder))
        try_wheel(env, wheel.resolve())
        try_sdist(env, sdist.resolve())
    print("both work")


if __name__ == "__main__":
    main()
