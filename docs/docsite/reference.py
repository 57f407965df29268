"""Reference pages of the public names, from signatures and docstrings; nothing is imported.

``docs/reference/NAME.md`` has a page's order: names in groups, each with links to read on and an
example, which ``tests/docs`` runs. Names that no group has are not listed.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath

import griffe

from docsite.code import ROOT
from docsite.errors import DocsError
from docsite.groups import groups
from docsite.links import outside_fences, place, relative

MODULES = {
    "memspan": "reference/memspan.md",
    "memspan.layers": "reference/layers.md",
    "memspan.models": "reference/models.md",
    "memspan.ops": "reference/ops.md",
    "statelaws": "reference/statelaws.md",
    "memspan.lab.integrations.lm_eval": "reference/lm_eval.md",
    "memspan.lab.integrations.torchrl": "reference/torchrl.md",
    "memspan.lab.integrations.transformers": "reference/transformers.md",
}
"""Modules whose names are public, and their pages."""
SOURCES = ("src", "packages/statelaws/src")
"""The folders that the packages are in."""
INDEX = "reference/index.md"
OF_AUTHORS = {"Backbone", "BackboneConfig", "Memory"}
"""Classes that are derived from by authors of architectures, who read what they may override."""
INTERNAL = {
    "add_positions", "after_attention", "apply_rule", "as_int32", "auxiliary_parameters",
    "before_attention", "begin_query", "bind", "can_fuse", "carried_inputs", "check",
    "check_memory_length", "clip_groups", "compiled_loops", "counts", "draw_projection",
    "end_query", "feature_width", "fingerprint", "float32_part", "fold", "frozen_keys_and_values",
    "fused_weight", "has_value_bias", "heads", "in_turn", "is_as_made", "longest_piece",
    "longest_segment", "n_groups", "n_projections", "needs_received", "of", "own_memory", "rank",
    "rate", "read_associative", "read_block", "read_piece", "reader_type", "received", "row_sizes",
    "segments_per_update", "slots", "span_penalty", "stack", "taken_from", "through", "units",
    "value_width", "values", "wrapped", "write_and_read", "writing_options",
}  # fmt: skip
"""Methods that parts of memspan call one another by, and that a reader of its models never does."""
SHAPES = re.compile(r"\b[A-Z]\w+\b")
"""Names of classes, in a signature."""


def reference_pages(
    root: Path = ROOT, shown: Callable[[str, str], str] = lambda text, page: text
) -> dict[str, str]:
    """Each page's Markdown, by its place on the site.

    Args:
        shown: what the site makes of a group's text, on a page.

    Raises:
        DocsError: a page's groups name what is not public.
    """
    pages: dict[str, str] = {}
    described: dict[str, str] = {}
    listed = []
    modules = list(_modules(root))
    places = _places(modules, root)
    for module, name in modules:
        page = MODULES[name]
        linked = partial(_linked, places=places, page=page)
        own = _text(_docstring(module))
        parts = [f"# `{name}`", f"*Part of [public names]({PurePosixPath(INDEX).name}).*", own]
        summary = " ".join(own.partition("\n\n")[0].split())
        listed.append(f"[`{name}`]({PurePosixPath(page).name}): {summary}")
        members = dict(_public(module))
        for group in groups(root / "docs" / page):
            if unknown := {*group.names} - {*members}:
                raise DocsError(f"docs/{page} names what is not public: {sorted(unknown)}")
            parts += [f"## {group.title}", shown(group.text, page)]
            for public in group.names:
                member = members[public]
                if member.path in described:
                    there = relative(PurePosixPath(described[member.path]), PurePosixPath(page))
                    parts += [f"### `{public}`", f"See [`{public}`]({there}#{public.lower()})."]
                else:
                    described[member.path] = page
                    parts.extend(_member(public, member, page, root, linked))
        text = "\n\n".join(part for part in parts if part) + "\n"
        pages[page] = outside_fences(text, partial(_resolved, places=places, page=page))
    lines = ["# Public names", "By module; a name stands where it is described."]
    pages[INDEX] = "\n\n".join([*lines, *(f"- {line}" for line in listed)]) + "\n"
    return pages


def _places(
    modules: list[tuple[griffe.Object | griffe.Alias, str]], root: Path
) -> dict[str, tuple[str, str]]:
    """Page and anchor of every public name, and of the methods that are listed."""
    found: dict[str, tuple[str, str]] = {}
    for module, name in modules:
        members = dict(_public(module))
        for group in groups(root / "docs" / MODULES[name]):
            for public in group.names:
                if public not in members or public in found:
                    continue
                found[public] = MODULES[name], public.lower()
                if members[public].is_class:
                    for method in _methods(public, members[public]):
                        inside = f"{public}.{method.name}"
                        found[inside] = MODULES[name], inside
    return found


def _resolved(text: str, *, places: dict[str, tuple[str, str]], page: str) -> str:
    """Text in which names of code lead to their entries, where they have one."""

    def link(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        parts = (match[2] or name).split(".")
        found = places.get(".".join(parts[-2:])) or places.get(parts[-1])
        if found is None:
            return f"`{name}`"
        there, anchor = found
        return f"[`{name}`]({relative(PurePosixPath(there), PurePosixPath(page))}#{anchor})"

    named = re.compile(r"\[`(\w+)`\]\(ref:([\w.]+)\)|(?<!\[)`([A-Z]\w+)`(?!\])")
    lines = text.split("\n")
    return "\n".join(line if line.startswith("#") else named.sub(link, line) for line in lines)


def _linked(code: str, *, places: dict[str, tuple[str, str]], page: str) -> str:
    """Code as HTML in which the names of classes lead to their entries."""

    def link(name: re.Match[str]) -> str:
        if name[0] not in places:
            return name[0]
        there, anchor = places[name[0]]
        at = relative(PurePosixPath(there).with_suffix(".html"), PurePosixPath(page))
        return f'<a href="{"" if there == page else at}#{anchor}">{name[0]}</a>'

    return SHAPES.sub(link, html.escape(code, quote=False))


def source_files(root: Path = ROOT) -> set[Path]:
    """The files that reference pages link to."""
    return {
        Path(str(member.filepath)).relative_to(root)
        for module, _ in _modules(root)
        for _, member in _public(module)
    }


def _modules(root: Path) -> Iterator[tuple[griffe.Object | griffe.Alias, str]]:
    paths = [root / folder for folder in SOURCES]
    packages = {
        name: griffe.load(name, search_paths=paths, docstring_parser="google")
        for name in dict.fromkeys(name.partition(".")[0] for name in MODULES)
    }
    for name in MODULES:
        package, _, inside = name.partition(".")
        yield (packages[package][inside] if inside else packages[package]), name


def _public(module: griffe.Object | griffe.Alias) -> Iterator[tuple[str, griffe.Object]]:
    """Names that the module gives away, wherever they are defined."""
    for name, member in sorted(module.members.items()):
        if name.startswith("_"):
            continue
        if isinstance(member, griffe.Alias):
            ours = member.target_path.partition(".")[0] in MODULES
            if ours and not member.final_target.is_module:
                yield name, member.final_target
        elif name in (module.exports or []):
            # Python's name is then the function's, griffe's that of the file that it is in.
            yield name, member.members.get(name, member) if member.is_module else member


def _member(
    name: str, member: griffe.Object, page: str, root: Path, linked: Callable[[str], str]
) -> Iterator[str]:
    yield f"### `{name}`"
    yield from _described(member, linked)
    yield _source(member, page, root)
    if not member.is_class:
        return
    fields = [
        f"- <code>{linked(f'{attribute.name}: {attribute.annotation}{_default(attribute)}')}</code>: "
        + _text(attribute.docstring.value)
        for attribute in _options(member)
        if not attribute.name.startswith("_")
        and attribute.docstring
        and attribute.annotation
        and "property" not in attribute.labels
        # Variables of a class are none of its options.
        and attribute.labels & {"class-attribute", "instance-attribute"} != {"class-attribute"}
    ]
    if fields:
        yield "\n".join(field.replace("\n", "\n  ") for field in fields)
    for method in _methods(name, member):
        yield f"#### `{name}.{method.name}` {{ #{name}.{method.name} }}"
        yield from _described(method, linked)


def _methods(name: str, member: griffe.Object) -> list[griffe.Object | griffe.Alias]:
    """A class's methods and properties, `forward` first."""
    methods = [
        method
        for method in member.members.values()
        if (method.is_function or "property" in method.labels)
        and not method.name.startswith("_")
        and method.docstring
        and (name in OF_AUTHORS or method.name not in INTERNAL)
    ]
    return sorted(methods, key=lambda method: method.name != "forward")


def _options(member: griffe.Object) -> list[griffe.Attribute | griffe.Object]:
    """A class's attributes, sizes first; of a class that is not made of them, its own alone."""
    if "dataclass" not in member.labels:
        return [attribute for attribute in member.members.values() if attribute.is_attribute]
    return sorted(member.attributes.values(), key=lambda option: str(option.annotation) != "int")


def _described(member: griffe.Object | griffe.Alias, linked: Callable[[str], str]) -> Iterator[str]:
    """The signature, then the docstring's sections."""
    if member.is_function:
        code = linked(_signature(member))
        yield f'<div class="signature highlight"><pre><code>{code}</code></pre></div>'
    if member.docstring is None:
        return
    for section in member.docstring.parse("google"):
        if section.kind is griffe.DocstringSectionKind.text:
            yield _text(section.value)
        elif section.kind is griffe.DocstringSectionKind.admonition:
            yield f"**{section.title}** {_text(section.value.description)}"
        else:
            title = {"parameters": "Arguments"}.get(section.kind.value, section.kind.value.title())
            yield f"**{title}**"
            yield "\n".join(_item(item) for item in section.value)


def _item(item: griffe.DocstringElement) -> str:
    name = getattr(item, "name", "") or (
        str(item.annotation) if isinstance(item, griffe.DocstringRaise) else ""
    )
    text = _text(item.description).replace("\n", "\n  ")
    return f"- `{name}`: {text}" if name else f"- {text}"


def _signature(function: griffe.Function | griffe.Object) -> str:
    """On one line where it fits, else a parameter a line."""
    assert isinstance(function, griffe.Function)
    parameters = []
    seen_star = False
    for parameter in function.parameters:
        if parameter.name == "self" or parameter.name == "cls":
            continue
        kind = parameter.kind
        if kind is griffe.ParameterKind.keyword_only and not seen_star:
            parameters.append("*")
            seen_star = True
        star = {
            griffe.ParameterKind.var_positional: "*",
            griffe.ParameterKind.var_keyword: "**",
        }.get(kind, "")
        seen_star = seen_star or star == "*"
        text = f"{star}{parameter.name}"
        if parameter.annotation is not None:
            text += f": {parameter.annotation}"
        if parameter.default is not None and not star:
            text += f" = {parameter.default}"
        parameters.append(text)
    result = f" -> {function.returns}" if function.returns is not None else ""
    line = f"{function.name}({', '.join(parameters)}){result}"
    if len(line) <= 88:
        return line
    inside = "".join(f"    {parameter},\n" for parameter in parameters)
    return f"{function.name}(\n{inside}){result}"


def _source(member: griffe.Object, page: str, root: Path) -> str:
    path = Path(str(member.filepath)).relative_to(root)
    there = relative(place(path, root), place(Path("docs", page), root))
    shown = str(path).removeprefix("src/memspan/")
    # Lines are put into the page after the build, so its own links cannot name them.
    href = f"{there.removesuffix('.md')}.html#L{member.lineno}"
    return f'<a href="{href}">{shown}, line {member.lineno}</a>'


def _default(attribute: griffe.Attribute | griffe.Object) -> str:
    value = getattr(attribute, "value", None)
    return f" = {value}" if value is not None else ""


def _docstring(member: griffe.Object | griffe.Alias) -> str:
    return member.docstring.value if member.docstring else ""


def _text(text: str) -> str:
    """A docstring's reStructuredText, as much of it as we use, as Markdown."""
    text = re.sub(r":\w+:`~?((?:[\w.]+\.)?(\w+))`", r"[`\2`](ref:\1)", text)
    text = text.replace("``", "`").replace("$", r"\$")
    return re.sub(r"::$", ":", text, flags=re.M)
