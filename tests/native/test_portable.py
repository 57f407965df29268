"""The C of Fast Weights computes the same numbers on another kind of processor.

``portable.txt`` was written on x86-64, where other tests compare the C with references in PyTorch:

    python tests/native/test_portable.py > tests/native/portable.txt
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "src" / "memspan"


def computed(folder: Path, compiler: str, *emulator: str) -> list[tuple[str, float]]:
    """Each result of ``portable.c``, by name."""
    program = folder / "portable"
    flags = ("-O1", "-ffast-math", "-fno-finite-math-only", "-Wno-psabi", "-DREAL=double")
    includes = (f"-I{PACKAGE / 'native'}", f"-I{PACKAGE / 'ops' / 'fast_weights'}")
    # An emulator would not find the shared libraries of the processor.
    linking = ("-static",) if emulator else ()
    source = str(HERE / "portable.c")
    command = [compiler, *flags, *includes, *linking, source, "-o", str(program), "-lm"]
    subprocess.run(command, check=True)
    done = subprocess.run([*emulator, str(program)], check=True, capture_output=True, text=True)
    return [(name, float(value)) for name, value in map(str.split, done.stdout.splitlines())]


@pytest.mark.parametrize(
    "commands", [("cc",), ("aarch64-linux-gnu-gcc", "qemu-aarch64-static")], ids=["here", "aarch64"]
)
def test_every_processor_computes_the_same(commands: tuple[str, ...], tmp_path: Path) -> None:
    missing = [command for command in commands if shutil.which(command) is None]
    if missing:
        pytest.skip(f"no {missing[0]}")
    lines = (HERE / "portable.txt").read_text().splitlines()
    expected = [(name, float(value)) for name, value in map(str.split, lines)]
    found = computed(tmp_path, *commands)
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (name, value), (_, wanted) in zip(found, expected, strict=True):
        assert value == pytest.approx(wanted, rel=1e-9, abs=1e-9), name


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made_in:
        for result, number in computed(Path(made_in), "cc"):
            print(result, repr(number))
