"""Importing memspan changes nothing in torch, and a reader only while it lives."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest
import torch
from torch.optim import optimizer

from architectures import feedback, transformer_xl
from readings import text

PROGRAM = """
import warnings
from importlib import import_module, util

import sympy  # Torch's, which filters warnings itself.
import torch
from torch import overrides
from torch.nn.modules import module
from torch.optim import optimizer
from torch.utils import _python_dispatch

if with_transformers := util.find_spec("transformers") is not None:
    import transformers.modeling_utils

def state():
    tables = {
        f"{place.__name__}.{name}": repr(table)
        for place in (module, optimizer)
        for name, table in vars(place).items()
        if name.startswith("_global") and not callable(table)
    }
    return tables | {
        "function modes": overrides._get_current_function_mode_stack(),
        "dispatch modes": _python_dispatch._get_current_dispatch_mode_stack(),
        "warnings": list(warnings.filters),
        "defaults": [torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()],
        "precision": torch.get_float32_matmul_precision(),
    }

before = state()
assert len(before) >= 12, before.keys()
names = ["memspan", "memspan.layers", "memspan.models", "memspan.ops"]
for name in names + ["memspan.lab.integrations.transformers"] * with_transformers:
    package = import_module(name)
    for public in dir(package):
        getattr(package, public)
    after = state()
    assert after == before, (name, [key for key in before if after[key] != before[key]])
"""


@pytest.mark.processes
def test_imports_register_nothing() -> None:
    """Torch's tables of hooks, its modes and defaults, and the filters of warnings."""
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


def hooks() -> list[object]:
    return list(optimizer._global_optimizer_post_hooks.values())


def test_a_hook_on_optimisers_lives_as_long_as_readers() -> None:
    gc.collect()
    before = hooks()
    model = transformer_xl().model()
    other = feedback().model()
    assert hooks() == before
    first = model.reader()
    assert len(hooks()) == len(before) + 1
    second = other.backbone.reader(None, 1)
    del first
    gc.collect()
    assert len(hooks()) == len(before) + 1
    del second
    gc.collect()
    assert hooks() == before


def test_readers_of_several_threads_share_the_hook() -> None:
    gc.collect()
    before = hooks()
    model = transformer_xl().model()

    def make_and_drop() -> None:
        for _ in range(20):
            model.reader().read(text(1, 1))

    threads = [threading.Thread(target=make_and_drop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert hooks() == before
    reader = model.reader()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(model.parameters(), fused=True).step()
    assert reader.is_stale
