"""Scripts that show a broken law: the calls of a case, and the functions that they call."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
from types import FunctionType
from typing import Any

from statelaws.protocol import Stateful
from statelaws.reading import device_of

Functions = Mapping[str, FunctionType]
"""Functions of the protocol, by name. They may close over ``module`` and over plain values."""
GIVEN = ("module", "torch")
"""Names that every script has."""
FUNCTIONS = (
    "module", "start", "read", "read_padded", "read_packed", "read_varlen", "replay",
    "select", "copy", "reset", "truncate", "save", "load",
)  # fmt: skip
"""Attributes of a model that a script may use."""


def script(model: Stateful[Any], lines: Sequence[str], shown: str, comment: str) -> str:
    """Python that runs ``lines`` as far as ``shown`` needs them, and prints that.

    It needs torch alone if the model has a method ``source(names)``: Python that makes the same module,
    in evaluation mode, and defines the functions of these names (:func:`source_of`). Nor does it need
    more if the model has ``made``, lines that define ``model``. Otherwise that must be defined, in
    evaluation mode.
    """
    names = _words(shown)
    last = max(
        (i for i, line in enumerate(lines) if names & _words(line.partition(" = ")[0])), default=0
    )
    inputs = lines[:2]
    calls = lines[2 : last + 1]
    used = _words("\n".join([*calls, shown]))
    inputs = [line for line in inputs if line.partition(" = ")[0] in used]
    head = ["import torch"]
    if "Path" in used:
        head.append("from pathlib import Path")
    source = getattr(model, "source", None)
    if source is not None:
        head += [source(used), ""]
    else:
        head.append(getattr(model, "made", "# model: what was checked, in evaluation mode"))
        head.append("; ".join(f"{name} = model.{name}" for name in FUNCTIONS if name in used))
        if "given" in used:
            head.append("given = model.inputs.given")
    device = device_of(model)
    if device.type != "cpu":
        name = "model.module" if source is None else "module"
        head.append(f"{name}.to({str(device)!r}); torch.set_default_device({str(device)!r})")
    if "autograd" not in used:
        head.append("torch.set_grad_enabled(False)")
    return "\n".join([*head, *inputs, *calls, f"print({shown})  # {comment}"]) + "\n"


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def source_of(functions: Functions, names: Collection[str]) -> str:
    """Python source that defines the ``functions`` whose names are in ``names``.

    Whatever they use comes first: imports, plain values as constants, and functions of the same file.
    """
    imports: dict[str, None] = {}
    constants: dict[str, None] = {}
    bodies: dict[str, str] = {}
    waiting = [function for name, function in functions.items() if name in names]
    while waiting:
        function = waiting.pop()
        if function.__name__ in bodies:
            continue
        bodies[function.__name__] = _bare(function)
        for name, value in _outside(function).items():
            if isinstance(value, FunctionType) and value.__module__ == function.__module__:
                waiting.append(value)
            elif isinstance(value, type | FunctionType):
                imports[f"from {value.__module__} import {value.__name__}"] = None
                if name != value.__name__:
                    constants[f"{name} = {value.__name__}"] = None
            else:
                constants[f"{name} = {value!r}"] = None
    first = "\n".join([*imports, *constants])
    return "\n\n".join(filter(None, [first, *reversed(bodies.values())]))


def _bare(function: FunctionType) -> str:
    """The source of a function, without annotations and docstring."""
    source = textwrap.dedent(inspect.getsource(function))
    definition = _definition(source)
    body = definition.body[ast.get_docstring(definition) is not None :]
    signature = inspect.signature(function)
    plain = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    signature = signature.replace(parameters=plain, return_annotation=signature.empty)
    lines = source.splitlines()[body[0].lineno - 1 :]
    return "\n".join([f"def {function.__name__}{signature}:", *lines])


def _outside(function: FunctionType) -> dict[str, Any]:
    """The names that a function uses and does not define, with their values."""
    known = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    definition = _definition(textwrap.dedent(inspect.getsource(function)))
    nodes = [node for statement in definition.body for node in ast.walk(statement)]
    names = [node for node in nodes if isinstance(node, ast.Name)]
    own = {node.arg for node in ast.walk(definition) if isinstance(node, ast.arg)}
    own |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
    used = [node.id for node in names if node.id not in (*own, *GIVEN) and node.id in known]
    return {name: known[name] for name in used}


def _definition(source: str) -> ast.FunctionDef:
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.FunctionDef)
    return definition


def by_name(*functions: Any) -> Functions:
    """Functions as a mapping from their names."""
    return {function.__name__: function for function in functions}
