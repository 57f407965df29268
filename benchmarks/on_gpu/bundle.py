"""Make a folder with everything that `make gpu` needs on a machine without a network.

    python benchmarks/on_gpu/bundle.py DIST PYTHON      (`make gpu-bundle` builds the packages before)

Such a machine brings Python, torch with CUDA and Triton. DIST/gpu-bundle has the rest: memspan with
its compiled C, statelaws and what they and the comparisons need as wheels for Linux, the tests, and
Triton's programs compiled for sm_80, sm_90 and gfx942 by PYTHON's Triton. `python run.py` in it starts
gpu.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("3.11", "3.12")
"""Releases of Python: packages with compiled parts are brought for each."""
FOR_ALL = (
    *("tyro", "docstring-parser", "typeguard", "rich", "markdown-it-py", "mdurl", "pygments"),
    *("platformdirs", "typing-extensions", "safetensors", "pytest", "iniconfig", "packaging"),
    *("pluggy", "pytest-xdist", "execnet", "sortedcontainers", "beartype"),
    *("labml-nn==0.5.1", "labml==0.4.168", "labml-helpers==0.4.89", "gitpython", "gitdb", "smmap"),
    *("einops", "einx", "loguru", "torch-einops-utils", "x-transformers==2.31.10"),
)
"""Packages that work with any Python; without dependencies, which are listed, too."""
FOR_EACH = ("numpy", "hypothesis", "pyyaml", "frozendict")
MOST_MIB = 60


def download(names: tuple[str, ...], version: str, folder: Path) -> None:
    """Fetch wheels of these versions, or of those in constraints.txt."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--python-version", version]
    command += ["--platform", "manylinux_2_28_x86_64", "--platform", "manylinux2014_x86_64"]
    command += ["--platform", "manylinux_2_27_x86_64", "-c", ROOT / "constraints.txt"]
    subprocess.run([*command, "-d", folder, *names], check=True)


def made(dist: Path, python: str) -> Path:
    """The folder, made anew."""
    bundle = dist / "gpu-bundle"
    shutil.rmtree(bundle, ignore_errors=True)
    (sdist,) = dist.glob("memspan-*.tar.gz")
    with tempfile.TemporaryDirectory() as folder, tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
        (unpacked,) = Path(folder).iterdir()
        # The package itself comes as a wheel, and the site and its pictures are for reading.
        kept = ("benchmarks", "tests", "hatch_build.py", "pyproject.toml", "LICENSE")
        for name in kept:
            source = unpacked / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, bundle / name)
    shutil.copy(ROOT / "benchmarks/on_gpu/run_bundle.py", bundle / "run.py")
    wheels = bundle / "wheels"
    wheels.mkdir()
    for name in ("memspan", "statelaws"):
        (wheel,) = dist.glob(f"{name}-*.whl")
        shutil.copy(wheel, wheels)
    download(FOR_ALL, VERSIONS[0], wheels)
    for version in VERSIONS:
        download(FOR_EACH, version, wheels)
    # In a process of its own, whose Python has Triton.
    script = ROOT / "benchmarks/relative_kernel.py"
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    subprocess.run(
        [python, script, "cache", bundle / "kernels"], check=True, env=environment, cwd=ROOT
    )
    # What it is compiled from, and on the way: to load a program its binary is enough.
    for path in (bundle / "kernels").glob("*/*"):
        if path.suffix not in (".cubin", ".hsaco", ".json"):
            path.unlink()
    return bundle


def main() -> None:
    bundle = made(Path(sys.argv[1]).resolve(), sys.argv[2])
    mib = sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file()) / 2**20
    print(f"{bundle}: {mib:.0f} MiB")
    if mib > MOST_MIB:
        raise SystemExit(f"it is larger than {MOST_MIB} MiB")


if __name__ == "__main__":
    main()
