"""Parquet files and data sets of the library datasets as corpora."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from memspan.data.corpora import load_corpus, located, missing
from memspan.errors import MemspanError

TEXTS = [f"Once, {n} ducks.\n" + "quack " * (n % 5) + "\n" for n in range(600)]
TABLE = {"id": list(range(600)), "body": TEXTS}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSPAN_CACHE", str(tmp_path / "cache"))


def _documents(name: str, field: str = "body") -> dict[str, list[str]]:
    splits = load_corpus(name, field).splits
    return {split: [t.read().decode() for t in texts] for split, texts in splits.items()}


@pytest.mark.smoke
def test_each_row_of_parquet_is_a_document(tmp_path: Path) -> None:
    pq.write_table(pa.table(TABLE), tmp_path / "t.parquet", row_group_size=100)
    splits = _documents(str(tmp_path / "t.parquet"))
    assert [text for texts in splits.values() for text in texts] == TEXTS


def test_bad_parquet_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table(TABLE), path)
    with pytest.raises(
        MemspanError, match=r"has no 'text'; it has 'id', 'body': name .*--data.field"
    ):
        load_corpus(str(path))
    with pytest.raises(MemspanError, match="row 1: id is of type int, not text"):
        load_corpus(str(path), "id")
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], whole[:3], b"", b"PAR1" + bytes(400) + whole[-400:]):
        path.write_bytes(content)
        with pytest.raises(MemspanError, match="cut short or damaged") as refusal:
            load_corpus(str(path), "body")
        assert "\n" not in str(refusal.value)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MemspanError, match="pip install pyarrow"):
        load_corpus(str(path), "body")


def test_a_saved_data_set_keeps_its_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"train": TEXTS[:500], "valid": TEXTS[500:550], "extra": TEXTS[550:]}
    whole = datasets.DatasetDict(
        {name: datasets.Dataset.from_dict({"body": texts}) for name, texts in parts.items()}
    )
    whole.save_to_disk(tmp_path / "dict")
    splits = _documents(str(tmp_path / "dict"))
    assert splits == {"train": TEXTS[:500], "validation": TEXTS[500:550]}
    (left_out,) = load_corpus(str(tmp_path / "dict"), "body").skipped
    assert left_out.startswith("extra (")

    # One part alone is cut between documents; rows may be chosen or reordered.
    whole["train"].select(range(499, -1, -1)).save_to_disk(tmp_path / "one")
    splits = _documents(str(tmp_path / "one"))
    assert list(map(len, splits.values())) == [448, 26, 26]
    assert splits["train"][0] == TEXTS[499]
    with pytest.raises(MemspanError, match="has no 'text'; it has 'body'"):
        load_corpus(str(tmp_path / "one"))
    (tmp_path / "one" / "state.json").write_text("{}")
    with pytest.raises(MemspanError, match="damaged data set"):
        load_corpus(str(tmp_path / "one"), "body")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MemspanError, match="pip install datasets"):
        load_corpus(str(tmp_path / "dict"), "body")


def test_another_data_set_with_the_same_fingerprint(tmp_path: Path) -> None:
    """Which a stranger may write into theirs: what is read is each data set's own text."""
    for name, texts in {"mine": TEXTS, "theirs": ["zqx\n"] * 30}.items():
        datasets.Dataset.from_dict({"body": texts}).save_to_disk(tmp_path / name)
        state = tmp_path / name / "state.json"
        content = json.loads(state.read_text())
        state.write_text(json.dumps(content | {"_fingerprint": "mine"}))
    for name, text in {"theirs": "zqx\n" * 30, "mine": "".join(TEXTS)}.items():
        splits = _documents(str(tmp_path / name)).values()
        assert "".join(itertools.chain.from_iterable(splits)) == text


def test_what_is_no_text_is_refused_unread(tmp_path: Path) -> None:
    """An image would be decoded first; here it cannot be."""
    columns = {"image": [{"bytes": b"no image", "path": None}], "id": [1], "words": [["a"]]}
    whole = datasets.Dataset.from_dict(columns)
    whole.cast_column("image", datasets.Image()).save_to_disk(tmp_path / "set")
    for name, kind in {"image": "PIL.Image.Image", "id": "int64", "words": "list"}.items():
        with pytest.raises(MemspanError, match=f"train: {name} is of type {kind}, not text: name"):
            load_corpus(str(tmp_path / "set"), name)


def test_a_name_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not missing("hf:me/ducks")
    assert located("hf:me/ducks") == "hf:me/ducks"
    asked: list[tuple[str, ...]] = []

    def found(*arguments: str) -> datasets.DatasetDict:
        asked.append(arguments)
        return datasets.DatasetDict({"train": datasets.Dataset.from_dict({"body": TEXTS})})

    with monkeypatch.context() as patched:
        patched.setattr(datasets, "load_dataset", found)
        assert _documents("hf:me/ducks:small")["train"][:500] == TEXTS[:500]
    assert asked == [("me/ducks", "small")]

    def unreachable(*arguments: str) -> None:
        raise ConnectionError("no network")

    with monkeypatch.context() as patched:
        patched.setattr(datasets, "load_dataset", unreachable)
        with pytest.raises(MemspanError, match=r"cannot load me/ducks from the hub \(no network\)"):
            load_corpus("hf:me/ducks")
    # No network: what to put where.
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(MemspanError, match=r"load_dataset\('me/ducks'\)\.save_to_disk") as refusal:
        load_corpus("hf:me/ducks")
    assert "\n" not in str(refusal.value)
