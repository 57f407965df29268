"""The package's public names: which they are, their signatures, and that showing them costs nothing.

``python tests/test_package.py > tests/public_names.txt`` after a change that is meant.
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import zipfile
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import memspan
import memspan.layers
import memspan.models
import memspan.ops
import statelaws
from docsite.groups import groups
from memspan.lab.installed import require

ROOT = Path(__file__).parents[1]
NAMES = Path(__file__).with_name("public_names.txt")
LAZY = (memspan, memspan.layers, memspan.models, memspan.ops)
MODULES = (*LAZY, statelaws)
INTEGRATIONS = {
    f"memspan.lab.integrations.{name}": ROOT / "src/memspan/lab/integrations" / file
    for name, file in {
        "lm_eval": "lm_eval/__init__.py",
        "torchrl": "torchrl.py",
        "transformers": "transformers/__init__.py",
    }.items()
}
"""Modules that need an extra: their names are read from the source, without signatures, which follow
those libraries."""
METHODS = (memspan.LanguageModel, memspan.layers.LayerMemory, memspan.Memory, memspan.models.Reader)
"""Classes whose methods are listed as well."""


def signatures(module: ModuleType) -> list[str]:
    """``name(parameters) -> result`` of the public names."""
    lines = []
    for name in sorted(module.__all__):
        member = getattr(module, name)
        full = f"{module.__name__}.{name}"
        lines.append(f"{full}{_signature(member) if callable(member) else ''}")
        if any(member is kind for kind in METHODS):
            for method, what in sorted(vars(member).items()):
                if not method.startswith("_") and not isinstance(what, type):
                    lines.append(f"{full}.{method}{_signature(getattr(member, method))}")
    return lines


def names_in(module: str) -> list[str]:
    """The public names of an integration."""
    tree = ast.parse(INTEGRATIONS[module].read_text(encoding="utf-8"))
    (names,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return [f"{module}.{name}" for name in sorted(names)]


def listed() -> list[str]:
    """All lines of the list."""
    lines = [line for module in MODULES for line in signatures(module)]
    return lines + [name for module in INTEGRATIONS for name in names_in(module)]


def _signature(member: Any) -> str:
    if isinstance(member, property):
        return f": {member.fget.__annotations__['return']}"
    if isinstance(member, type) and member.__init__ is Exception.__init__:
        return ""
    return str(inspect.signature(member)).replace("'", "")


def test_public_names_and_signatures_are_those_listed() -> None:
    changed = sorted({*NAMES.read_text().splitlines()} ^ {*listed()})
    assert not changed, f"if this is meant: python tests/test_package.py > {NAMES.name}"


def test_reference_describes_the_listed_modules() -> None:
    """Read from the source, since the site's generator has an environment of its own."""
    tree = ast.parse((ROOT / "docs/docsite/reference.py").read_text(encoding="utf-8"))
    (described,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODULES"
    ]
    assert described.keys() == {*(module.__name__ for module in MODULES), *INTEGRATIONS}


@pytest.mark.parametrize("module", [*(m.__name__ for m in MODULES), *INTEGRATIONS])
def test_every_public_name_is_in_an_example_of_the_reference(module: str) -> None:
    """tests/docs/test_examples.py runs them."""
    page = ROOT / "docs/reference" / f"{module.rpartition('.')[2]}.md"
    found = []
    for group in groups(page):
        code = "\n".join(re.findall(r"```python\n(.*?)```", group.text, flags=re.S))
        found += [name for name in group.names if re.search(rf"\b{name}\b", code)]
        assert re.search(r"\]\(\.\./[\w/-]+\.md", group.text), f"no page to read on: {group.title}"
    lines = NAMES.read_text(encoding="utf-8").splitlines()
    own = (re.match(rf"{re.escape(module)}\.(\w+)(\(|$)", line) for line in lines)
    public = {line[1] for line in own if line}
    assert sorted(found) == sorted(public)


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_dir_shows_what_is_public(module: ModuleType) -> None:
    assert set(module.__all__) == set(dir(module)) - {"__version__"}
    assert all(getattr(module, name) is not None for name in dir(module))
    assert not [n for n in module.__all__ if not inspect.getdoc(getattr(module, n))]


@pytest.mark.processes
def test_dir_and_options_do_not_import_torch() -> None:
    program = (
        "import memspan, memspan.models, memspan.ops, sys; dir(memspan); dir(memspan.ops);"
        "memspan.models.TransformerXLConfig;"
        "memspan.RunConfig; memspan.Sampling; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("module", LAZY, ids=lambda m: m.__name__)
def test_type_checkers_see_the_names_that_are_imported(module: ModuleType) -> None:
    """A lazy module states its names twice: once for type checkers and once for Python."""
    assert module.__file__
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    imports = {
        name.asname: getattr(import_module(node.module or ""), name.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for name in node.names
        if name.asname == name.name
    }
    assert imports == {name: getattr(module, name) for name in module.__all__}


@pytest.mark.processes
def test_names_are_found_in_a_zip_file(tmp_path: Path) -> None:
    archive = tmp_path / "memspan.zip"
    package = Path(memspan.__file__).parent
    with zipfile.ZipFile(archive, "w") as packed:
        for file in package.rglob("*"):
            packed.write(file, Path("memspan", file.relative_to(package)))
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "import memspan.layers, memspan.models, memspan.ops;"
        "assert memspan.__file__.startswith(sys.argv[1]);"
        "assert 'train' in dir(memspan) and memspan.layers.__all__ and memspan.ops.__all__;"
        "memspan.RunConfig; memspan.models.TransformerXLConfig"
    )
    subprocess.run([sys.executable, "-c", program, str(archive)], check=True, cwd=tmp_path)


def test_a_library_that_is_old_or_not_installed_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``python -m`` imports the package before any code of ours can catch what it raises."""

    def version(name: str) -> str:
        if name == "transformers":
            return "4.57.6"
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    old = r"transformers 4\.57\.6 is too old, 5\.4 is needed: pip"
    with pytest.raises(memspan.MemspanError, match=old):
        require("transformers")
    harness = "memspan.lab.integrations.lm_eval"
    monkeypatch.delitem(sys.modules, harness, raising=False)
    monkeypatch.setattr(sys, "argv", ["-m"])
    with pytest.raises(SystemExit) as ended:
        import_module(harness)
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "memspan: lm-eval is not installed: pip install 'lm-eval>=0.4.13'\n"
    )


def test_examples_import_public_names_only() -> None:
    public = {module.__name__: dir(module) for module in MODULES}
    private = [
        (file.name, name)
        for file in (ROOT / "examples").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "memspan"
        for name in (f"{node.module}.{each.name}" for each in node.names)
        if name.rpartition(".")[2] not in public.get(node.module or "", [])
    ]
    assert not private


def test_nothing_says_to_install_memspan_from_an_index() -> None:
    """It is on none, so anyone could register the name there. An address after it is one's own."""
    files = [ROOT / "README.md", ROOT / "CHANGELOG.md"]
    for folder in ("src", "docs", "examples"):
        files += [path for path in (ROOT / folder).rglob("*") if "results" not in path.parts]
    offers = re.compile(r"memspan\[[a-z,]+\](?! @ )|pip3? install ['\"]?memspan\b(?!-\S+\.whl)")
    for path in files:
        if path.suffix in {".py", ".md", ".toml", ".ipynb", ".html"}:
            assert not offers.search(path.read_text(encoding="utf-8")), path


if __name__ == "__main__":
    print(*listed(), sep="\n")
