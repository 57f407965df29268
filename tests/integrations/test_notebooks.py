"""The notebooks run, and what is stored with them tells nothing of the machine that made it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from docsite.notebooks import addressed
from notebooks.execute import HERE, executed

NUMBER = r"-?\d[\d,]*\.?\d*(?:e[-+]\d+)?"
ANSWER = "<details markdown>\n<summary>Answer</summary>\n\n"
"""Begins the answer to a question. The solutions of exercises have a test of their own."""
NOTEBOOKS = sorted(HERE.glob("*.ipynb"))


@pytest.mark.processes
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path: Path, tmp_path: Path) -> None:
    stored = json.loads(path.read_text())["cells"]
    copy = tmp_path / path.name
    copy.write_text(json.dumps(answered(json.loads(path.read_text()))))
    for before, cell in zip(stored, executed(copy, tmp_path).cells, strict=True):
        kinds = [output["output_type"] for output in before.get("outputs", [])]
        assert [output.output_type for output in cell.get("outputs", [])] == kinds
        if path.stem != "tour":  # which trains, and writes what it samples
            assert numbers(cell) == pytest.approx(numbers(before), rel=0.05, abs=0.02)


def answered(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the code of each answer in the empty cell that its question leaves."""
    code = ""
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if source.startswith(ANSWER):
            (code,) = re.findall(r"^```python\n(.*?)^```$", source, flags=re.M | re.S)
        elif source.startswith("# Your "):
            assert cell["outputs"] == []
            cell["source"], code = code, ""
    assert not code
    return notebook


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_question_has_an_answer_that_is_checked(path: Path) -> None:
    cells = ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"]]
    asked = [n for n, source in enumerate(cells) if source.startswith("**Your turn.**")]
    assert asked or path.stem.startswith("exercises")
    for n in asked:
        answer = cells[n + 1]
        assert answer.startswith(ANSWER)
        assert answer.endswith("\n\n</details>")
        assert "assert " in answer


def numbers(cell: dict[str, Any]) -> list[float]:
    """Numbers that a cell has printed; processors differ in the last digits."""
    printed = ["".join(output.get("text", "")) for output in cell.get("outputs", [])]
    return [float(n.replace(",", "")) for n in re.findall(NUMBER, "\n".join(printed))]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_first_cell_installs_what_is_missing(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the repository where its address was put in; elsewhere it says how to."""
    cell = next(c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code")
    package = "statelaws" if path.stem.startswith("exercises") else "memspan"
    run: list[str] = []
    shell = SimpleNamespace(run_line_magic=lambda name, line: run.append(f"{name} {line}"))

    def execute(text: str) -> None:
        source = "".join(json.loads(text)["source"])
        exec(TransformerManager().transform_cell(source), {"get_ipython": lambda: shell})

    here = json.dumps(cell)
    there = addressed(here, "https://github.com/me/it")
    execute(there)
    assert run == []
    assert capsys.readouterr().out == ""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    execute(here)
    assert run == []
    said = capsys.readouterr().out
    assert said.startswith(f"{package} is missing: in a clone of its repository, run pip install ")
    assert said.count("\n") == 1
    execute(there)
    (line,) = run
    assert line.startswith(f'pip install --quiet "{package}')
    assert "@ git+{REPOSITORY}" in line
    assert 'REPOSITORY = "https://github.com/me/it"' in "".join(json.loads(there)["source"])


def test_stored_outputs_are_small_and_of_no_machine() -> None:
    assert len(NOTEBOOKS) == 8
    assert sum(path.stat().st_size for path in NOTEBOOKS) < 1_000_000
    for path in NOTEBOOKS:
        text = path.read_text()
        notebook = json.loads(text)
        code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
        assert all(not cell["metadata"] for cell in code)
        assert notebook["metadata"]["language_info"] == {"name": "python"}
        assert "image/png" in text or path.stem.startswith("exercises")
        assert not [s for s in (os.sep + "tmp", os.sep + "home", "site-packages") if s in text]
        assert "Warning" not in text
