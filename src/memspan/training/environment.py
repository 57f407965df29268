"""What a run's rounding depends on besides its options: recorded at every save, compared at resume."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import torch

from memspan import __version__
from memspan.models import LanguageModel
from memspan.precision.products import Precision


def environment(
    model: LanguageModel, device: torch.device, precision: Precision, n_processes: int
) -> dict[str, object]:
    """Plain JSON values by name."""
    on_gpu = device.type == "cuda"
    return {
        "memspan": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if on_gpu else device.type,
        "processor": _processor(),
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "processes": n_processes,
        "compiled loops": model.backbone.compiled_loops(),
        "precision": precision.products,
        "float32 products": precision.matmul,
    }


def difference(saved: object, now: dict[str, object]) -> str | None:
    """One line about what differs and what follows; None if nothing does, or it was not recorded."""
    if not isinstance(saved, dict):
        return None
    # Quoted as JSON: text from a file may hold escapes that a terminal would obey.
    changed = [
        f"{name} {json.dumps(saved[name])}, now {json.dumps(value)}"
        for name, value in now.items()
        if name in saved and saved[name] != value
    ]
    if not changed:
        return None
    return (
        f"the last checkpoint was made in another environment ({'; '.join(changed)}): the run goes on "
        "from the same state, but sums may be rounded differently, so its weights may differ from "
        "those of a run that was not interrupted"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
