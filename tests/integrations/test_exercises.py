"""The exercises in notebooks: empty ones say what is missing, solutions are right, and the faults that
their text names are found."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from IPython.core.inputtransformer2 import TransformerManager

HERE = Path(__file__).parents[2] / "examples" / "notebooks"
EXERCISES = {
    "window": "write_a_memory",
    "rmt": "write_a_memory",
    "delta rule": "write_a_memory",
    "reset": "keep_a_state",
    "roll back": "keep_a_state",
    "resume": "keep_a_state",
}
FAULTS = [
    ("window", "-(WINDOW - 1) :", "-(WINDOW - 2) :", "Not yet, cuts"),
    ("window", "seen[:, -(WINDOW - 1) :]", "seen", "Not yet, bounded"),
    ("rmt", ".tril()", "", "Not yet, causality"),
    (
        "rmt",
        "memory = y[:, SLOTS + n :]",
        "memory = y[:, SLOTS + n :].detach()",
        "Not yet, gradients",
    ),
    ("delta rule", "W + beta", "W + 0.5 * beta", "the rows end with"),
    ("delta rule", "W = W + ", "W += ", "Not yet, values"),
    (
        "reset",
        "state.items()",
        '{**state, "count": 0 * state["h"]}.items()',
        "Not yet, fresh-start",
    ),
    ("reset", "masked_fill(where, 0)", "masked_fill(where.any(), 0)", "Not yet, fresh-start"),
    ("roll back", ": state.shape[1] - n", ": state.shape[1] - n - 1", "Not yet, roll-back"),
    ("resume", "torch.save(state, path)", "torch.save((*state[:2], 0), path)", "Not yet, files"),
]


def cells(name: str) -> list[tuple[str, str]]:
    notebook = json.loads((HERE / f"exercises_{EXERCISES[name]}.ipynb").read_text())
    return [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]


def solution(name: str) -> str:
    """The code within the first note after the exercise that has some."""
    parts = cells(name)
    at = parts.index(next(part for part in parts if part[1].startswith(f"# exercise: {name}\n")))
    notes = (text for kind, text in parts[at:] if kind == "markdown")
    found = next(
        filter(None, (re.search(r"```python\n(.*?)```", text, re.DOTALL) for text in notes))
    )
    return found[1]


def printed(name: str, written: str | None, capsys: pytest.CaptureFixture[str]) -> str:
    """The marks of one exercise, with its cell as it is or with another one."""
    space: dict[str, Any] = {}
    code = [text for kind, text in cells(name) if kind == "code"]
    at = next(i for i, text in enumerate(code) if text.startswith(f"# exercise: {name}\n"))
    for text in code[:at]:
        if not text.startswith("# exercise") and "\nmark(" not in text:
            exec(TransformerManager().transform_cell(text), space)
    exec(code[at] if written is None else written, space)
    exec(code[at + 1], space)
    return capsys.readouterr().out


@pytest.mark.parametrize("name", EXERCISES)
def test_an_empty_exercise_says_what_to_return(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(name, None, capsys)
    assert re.match(r"Not yet, [\w-]+: .*\.\nIt is refused: NotImplementedError: (re|w)", text)


@pytest.mark.parametrize("name", EXERCISES)
def test_the_solution_of_an_exercise_is_right(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert printed(name, solution(name), capsys).startswith("Right: ")


@pytest.mark.parametrize(("name", "right", "wrong", "says"), FAULTS)
def test_a_fault_in_an_exercise_is_named(
    name: str, right: str, wrong: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    written = solution(name)
    assert right in written
    assert says in printed(name, written.replace(right, wrong), capsys)
