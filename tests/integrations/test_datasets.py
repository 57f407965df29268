"""Tables and data sets, read by the library datasets, as corpora."""

from __future__ import annotations

import bz2
import gzip
import itertools
import json
import lzma
import socket
import sys
import time
import urllib.request
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from memspan.errors import MemspanError
from memspan.lab.data import hugging_face
from memspan.lab.data.corpora import load_corpus, located, missing

pytestmark = pytest.mark.usefixtures("own_folders")
TEXTS = [f"Once, {n} ducks.\n" + "quack " * (n % 5) + "\n" for n in range(600)]


def documents(name: str) -> dict[str, list[str]]:
    splits = load_corpus(name, "body").splits
    return {split: [t.read().decode() for t in texts] for split, texts in splits.items()}


def data_set(texts: list[str]) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"body": texts})


def refused(name: str, words: str, field: str = "body") -> None:
    with pytest.raises(MemspanError, match=words) as refusal:
        load_corpus(name, field)
    assert "\n" not in str(refusal.value)


@pytest.mark.smoke
def test_reads_each_row_of_a_parquet_file(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("t.parquet")
    table = pa.table({"id": list(range(600)), "body": TEXTS})
    pq.write_table(table, path, row_group_size=100)
    assert [*itertools.chain(*documents("t.parquet").values())] == TEXTS
    refused("t.parquet", "has no 'text'; it has 'id', 'body': name .*--data.field", "text")
    refused("t.parquet", "id is of type int64, not text", "id")
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], whole[:3], b"", b"PAR1" + bytes(400) + whole[-400:]):
        path.write_bytes(content)
        refused("t.parquet", "cut short or damaged")
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused("t.parquet", "pip install datasets, or name other files, such as")


PACKED = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize(
    ("name", "separator"),
    [
        ("a.csv", ","),
        ("b.csv", ";"),
        ("A.CSV.gz", "\t"),
        ("[a] b.csv", ","),
        ("a.csv.xz", ","),
        ("a.csv.bz2", ","),
        (".hidden/a.tsv", "\t"),
    ],
)
def test_reads_tables_as_spreadsheets_write_them(name: str, separator: str) -> None:
    """With a byte order mark, quotes, line breaks, empty fields, and texts that look like numbers."""
    rows = 'body,id\n"said ""no"", twice",1\n\n"two\nlines",2\n,3\nNA,4\n1.50,x\n'
    content = b"\xef\xbb\xbf" + rows.replace(",", separator).replace("\n", "\r\n").encode()
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(PACKED.get(path.suffix, bytes)(content))
    corpus = load_corpus({"test": name}, "body")
    found = [text.read().decode() for text in corpus.splits["test"]]
    assert found == [f'said "no"{separator} twice\n', "two\r\nlines\n", "", "NA\n", "1.50\n"]
    assert corpus.remarks == (f"1 of 5 records of {name} has no text",)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"id,text\n1,a\n", "no 'body'; it has 'id', 'text': .*, or call it .txt"),
        (b"id,body\n1,a,b\n", "not a valid table .*: quote texts that hold separators"),
        (b"id,body\n1,a\n1,a,b\n", "not a valid table .*Expected 2 fields in line 3, saw 3"),
        (b'body\n"a\n', "not a valid table .*EOF inside string"),
        (b"body\ncaf\xe9\n", "t.csv is not UTF-8"),
        (b"", "t.csv is empty"),
        (b"body\n", "t.csv is empty"),
    ],
)
def test_refuses_tables_that_cannot_be_read(
    content: bytes, line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("t.csv").write_bytes(content)
    refused("t.csv", line)
    assert capfd.readouterr() == ("", "")


def test_a_damaged_archive_of_a_table_is_refused() -> None:
    whole = gzip.compress(b"body\n" + bytes(f"{2**4000}\n", "ascii") * 9)
    Path("t.csv.gz").write_bytes(whole[: len(whole) // 2])
    refused("t.csv.gz", "t.csv.gz is cut short or damaged")


def test_skips_tables_of_something_else_in_a_folder() -> None:
    Path("texts").mkdir()
    Path("texts/a.tsv").write_text("id\tlabel\n1\tx\n")
    Path("texts/b.txt").write_text("a text\n")
    assert load_corpus("texts", "body").skipped == ("a.tsv (no field 'body')",)


def test_a_saved_data_set_keeps_its_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"train": TEXTS[:500], "valid": TEXTS[500:550], "extra": TEXTS[550:]}
    whole = datasets.DatasetDict({name: data_set(texts) for name, texts in parts.items()})
    whole.save_to_disk("dict")
    assert documents("dict") == {"train": TEXTS[:500], "validation": TEXTS[500:550]}
    (left_out,) = load_corpus("dict", "body").skipped
    assert left_out.startswith("extra (")

    # One part alone is cut between documents; rows may be chosen or reordered.
    whole["train"].select(range(499, -1, -1)).save_to_disk("one")
    splits = documents("one")
    assert list(map(len, splits.values())) == [448, 26, 26]
    assert splits["train"][0] == TEXTS[499]
    refused("one", "has no 'text'; it has 'body'", "text")
    Path("one/state.json").write_text("{}")
    refused("one", "damaged data set")
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused("dict", "pip install datasets")


def test_tells_data_sets_of_one_fingerprint_apart() -> None:
    """A stranger may write one into theirs: each data set's own text is read."""
    for name, texts in {"mine": TEXTS, "theirs": ["zqx\n"] * 30}.items():
        data_set(texts).save_to_disk(name)
        state = Path(name, "state.json")
        state.write_text(json.dumps(json.loads(state.read_text()) | {"_fingerprint": "mine"}))
    for name, text in {"theirs": "zqx\n" * 30, "mine": "".join(TEXTS)}.items():
        assert "".join(itertools.chain(*documents(name).values())) == text


def test_refuses_columns_without_text_unread() -> None:
    """An image would be decoded first; here it cannot be."""
    columns = {"image": [{"bytes": b"no image", "path": None}], "id": [1], "words": [["a"]]}
    whole = datasets.Dataset.from_dict(columns)
    whole.cast_column("image", datasets.Image()).save_to_disk("set")
    for name, kind in {"image": "PIL.Image.Image", "id": "int64"}.items():
        refused("set", f"train: {name} is of type {kind}, not text: name", name)


def test_a_path_leads_to_texts_inside_a_row() -> None:
    chats = [
        [{"role": "user", "content": f"Hi {n}"}, {"role": "x", "content": "Oh"}] for n in range(4)
    ]
    datasets.Dataset.from_dict({"messages": chats, "id": [*range(4)]}).save_to_disk("set")
    pq.write_table(pa.table({"messages": chats}), "t.parquet")
    for name in ("set", "t.parquet"):
        (found,) = load_corpus({"test": name}, "messages[].content").splits.values()
        assert [text.read() for text in found] == [f"Hi {n}\nOh\n".encode() for n in range(4)]
        refused(
            name, r"messages is of type list, .* may be messages\[\]\.content: name", "messages"
        )
        refused(name, r"row 1: id is of type int|has no 'id", "id[].content")


def test_reads_a_name_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not missing("hf:me/ducks")
    assert located("hf:me/ducks") == "hf:me/ducks"
    asked: list[tuple[str, ...]] = []

    def found(*arguments: str) -> datasets.DatasetDict:
        asked.append(arguments)
        if len(asked) > 1:
            raise ConnectionError("no network")
        return datasets.DatasetDict({"train": data_set(TEXTS)})

    with monkeypatch.context() as patched:
        patched.setattr(datasets, "load_dataset", found)
        patched.setattr(hugging_face, "_resolves", lambda host: True)
        assert documents("hf:me/ducks:small")["train"][:500] == TEXTS[:500]
        assert asked == [("me/ducks", "small")]
        refused("hf:me/ducks", r"cannot load me/ducks from the hub \(no network\)")
    # No network: what to put where.
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    refused("hf:me/ducks", r"load_dataset\('me/ducks'\)\.save_to_disk")


def test_without_a_network_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The libraries would ask five times more, after 1, 2, 4, 8 and 8 seconds."""
    monkeypatch.setattr(socket, "getaddrinfo", _unresolved)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits"))
    monkeypatch.setattr(urllib.request, "getproxies", dict)
    refused(
        "hf:me/ducks", r"cannot load me/ducks from the hub \(there is no network: huggingface\.co "
    )
    assert not datasets.config.HF_HUB_OFFLINE


def _unresolved(*arguments: object, **options: object) -> None:
    raise socket.gaierror(-2, "Name or service not known")
