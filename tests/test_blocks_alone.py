"""What comes along when one operation or layer is taken home: counted in a fresh process."""

from __future__ import annotations

import subprocess
import sys

import pytest

MOST = (11, 1599)
"""Modules and lines: a third of the 34 and 4,798 that one layer's attention once imported."""
MOST_OF = {
    "TransformerXL": (11, 1749),
    "Compressive": (12, 2199),
    "feedback_recurrence": (13, 2199),
}
"""Relative attention, what compresses, and Feedback's two loops. In their stacks the first two import
30 and 31 modules, 4,963 and 5,484 lines."""
PROGRAM = """
import sys

import pytest
from importlib import import_module

import torch
import memspan

def ours():
    return {n for n in sys.modules if n == "memspan" or n.startswith("memspan.")}

for package in sys.argv[1:]:
    for name in dir(import_module(package)):
        # As in a process of its own, without the seconds that torch takes in each.
        for module in ours():
            del sys.modules[module]
        getattr(import_module(package), name)
        files = [open(sys.modules[module].__file__).readlines() for module in ours()]
        # Folders have an __init__.py; an empty one is no module to read.
        print(f"{package}.{name}", sum(map(bool, files)), sum(map(len, files)))
"""


@pytest.mark.processes
def test_a_block_brings_little_along() -> None:
    command = [sys.executable, "-c", PROGRAM, "memspan.ops", "memspan.layers"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    counts = {name: (int(m), int(n)) for name, m, n in map(str.split, done.stdout.splitlines())}
    assert counts["memspan.ops.delta_rule"] > (1, 1)
    large = {}
    for name, (modules, lines) in counts.items():
        of = (most for kind, most in MOST_OF.items() if f".{kind}" in name)
        most_modules, most_lines = next(of, MOST)
        if modules > most_modules or lines > most_lines:
            large[name] = modules, lines
    assert not large
