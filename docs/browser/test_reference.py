"""The reference, which needs griffe and so the site's own environment."""

from __future__ import annotations

import re

import griffe

from docsite import reference

PAGES = reference.reference_pages()
ENTRIES = {entry for text in PAGES.values() for entry in re.findall(r"^#+ `([\w.]+)`", text, re.M)}


def test_nothing_internal_is_listed() -> None:
    listed = {entry for entry in ENTRIES if "." in entry and not entry.startswith("memspan")}
    inside = {entry for entry in listed if entry.partition(".")[0] not in reference.OF_AUTHORS}
    assert "TransformerXL.initial_memory" in inside
    assert not {entry.partition(".")[2] for entry in inside} & reference.INTERNAL
    assert not any(name.startswith("_") for entry in listed for name in entry.split("."))
    backbone = PAGES["reference/models.md"].partition("### `TransformerXL`")[2].partition("###")[0]
    assert "knows_documents" not in backbone


def test_every_internal_name_is_there() -> None:
    """One that is gone from the library goes from the list, too."""
    found = set()
    for module, _ in reference._modules(reference.ROOT):
        for _, member in reference._public(module):
            if isinstance(member, griffe.Class):
                found |= {*member.all_members}
    assert found >= reference.INTERNAL


def test_types_lead_to_their_entries() -> None:
    assert (
        '<a href="#transformerxlmemory">TransformerXLMemory</a> | None'
        in PAGES["reference/models.md"]
    )
    assert '-&gt; <a href="#run">Run</a>' in PAGES["reference/memspan.md"]
    assert "[`MemspanError`](memspan.md#memspanerror): " in PAGES["reference/ops.md"]


def test_sizes_are_the_first_options() -> None:
    config = PAGES["reference/models.md"].partition("### `TransformerXLConfig`")[2]
    options = re.findall(r"^- <code>(\w+):", config, flags=re.M)
    assert options[:5] == ["n_layers", "d_model", "n_heads", "d_ff", "memory_length"]
    assert "initialisation" in options[5:]


def test_every_member_of_a_reader_has_an_entry() -> None:
    """One without a docstring would be left out."""
    names = (reference.ROOT / "tests" / "public_names.txt").read_text()
    members = set(re.findall(r"^memspan\.models\.(Reader\.\w+)", names, re.M))
    assert "Reader.device" in members
    assert members <= ENTRIES
