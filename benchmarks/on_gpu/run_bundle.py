"""Run `make gpu` from a bundle, without a network: python run.py [options of benchmarks/gpu.py]

Needs torch with CUDA and Triton in this Python. Nothing is installed: the wheels are unpacked beside
this file.
"""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGES = HERE / "packages"


def fits(wheel: Path) -> bool:
    """True if this Python can import what the wheel brings, by its name."""
    python, abi, _ = wheel.stem.split("-")[-3:]
    mine = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return mine in python.split(".") or "py3" in python.split(".") or abi == "abi3"


def main() -> None:
    if not PACKAGES.exists():
        PACKAGES.mkdir()
        for wheel in sorted((HERE / "wheels").glob("*.whl")):
            if fits(wheel):
                zipfile.ZipFile(wheel).extractall(PACKAGES)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(PACKAGES), *([before] if before else [])])
    os.chdir(HERE)
    os.execv(sys.executable, [sys.executable, "benchmarks/gpu.py", *sys.argv[1:]])


if __name__ == "__main__":
    main()
