"""Lines about texts that are read, but may not be meant as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from memspan.errors import MemspanError
from memspan.lab.data.corpora import load_corpus
from memspan.lab.data.encodings import UNKNOWN, encoding_hint, encoding_of
from memspan.lab.data.prepared import prepare

# ruff: noqa: RUF001 (letters that look like others)
pytestmark = pytest.mark.usefixtures("own_folders")

GERMAN = "Grüße aus Köln, naïve Leute. Die Straße ist schön.\n"
FRENCH = "Les êtres humains naissent libres et égaux, doués de raison, où ça a été dit à Noël.\n"
POLISH = "Wszyscy ludzie rodzą się wolni i równi pod względem swej godności i swych praw.\n"
CZECH = "Všichni lidé se rodí svobodní a sobě rovní co do důstojnosti a práv.\n"
RUSSIAN = "Все счастливые семьи похожи друг на друга, каждая несчастливая несчастлива по-своему.\n"
GREEK = "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια.\n"
HEBREW = "כל בני האדם נולדו בני חורין ושווים בערכם ובזכויותיהם.\n"
JAPANESE = "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。\n"
CHINESE = "对于所有的学生来说,学习是一件重要的事情。我们在这里谈论的是他们的学习。\n"
TAIWANESE = "對於所有的學生來說,學習是一件重要的事情。我們在這裡談論的是學習。\n"
KOREAN = "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.\n"


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (GERMAN, "UTF-16"),
        (RUSSIAN, "UTF-32"),
        (GERMAN, "CP1252"),
        (FRENCH, "CP1252"),
        (POLISH, "CP1250"),
        (POLISH, "ISO-8859-2"),
        (CZECH, "CP1250"),
        (CZECH, "ISO-8859-2"),
        (RUSSIAN, "CP1251"),
        (RUSSIAN, "KOI8-R"),
        (GREEK, "CP1253"),
        (HEBREW, "CP1255"),
        (JAPANESE, "CP932"),
        (JAPANESE, "EUC-JP"),
        (CHINESE, "GB18030"),
        (TAIWANESE, "BIG5"),
        (KOREAN, "CP949"),
    ],
)
@pytest.mark.parametrize("repeats", [1, 300])
def test_encodings_are_recognised(text: str, encoding: str, repeats: int) -> None:
    """Also where the first bytes end inside a character."""
    assert encoding_of((text * repeats).encode(encoding)[:8191]) == encoding


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ((GERMAN * 9).encode("utf-16-le"), "UTF-16LE"),
        ((GERMAN * 9).encode("utf-16-be"), "UTF-16BE"),
        (RUSSIAN.encode("cp866"), UNKNOWN),
        (GERMAN.encode(), None),
        ("世界".encode()[:-1], None),
        (b"\x89PNG\r\n\x1a\n\0\0", None),
        (b"\xff\x01" * 9, None),
    ],
)
def test_leaves_some_encodings_unguessed(content: bytes, expected: str | None) -> None:
    assert encoding_of(content) == expected


def test_a_text_without_a_byte_order_mark_is_quoted() -> None:
    hint = encoding_hint("a.txt", (GERMAN * 9).encode("utf-16-le"))
    assert hint is not None
    assert re.search(r"looks like UTF-16LE \(.*iconv -f UTF-16LE -t UTF-8", hint)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            RUSSIAN.encode("cp1251"),
            r'^t/a\.txt looks like CP1251 \("Все счастливые семьи"\), not UTF-8, .* convert it '
            r"\(iconv -f CP1251 -t UTF-8 FILE\) first$",
        ),
        (
            RUSSIAN.encode("cp866"),
            r"^t/a\.txt is not UTF-8, .*\(iconv -f ENCODING -t UTF-8 FILE\) ",
        ),
        # Far behind its first bytes.
        (b"plain\n" * 9000 + JAPANESE.encode("cp932"), r"^t/a\.txt looks like CP932 \("),
        (
            b"\xef\xbb\xbfone\r\ntwo\r\n",
            "byte order mark and ends its lines with CR LF, .*: dos2unix",
        ),
        (b"one\r\ntwo\r\n", r"^t/a\.txt ends its lines with CR LF"),
        (GERMAN.encode() + "世".encode()[:-1], ""),
        (GERMAN.encode(), ""),
    ],
)
def test_remarks_name_the_file(content: bytes, says: str) -> None:
    Path("t").mkdir()
    Path("t/a.txt").write_bytes(content)
    Path("t/b.txt").write_text("plain " * 40)
    remarks = load_corpus("t").remarks
    assert len(remarks) == bool(says)
    for name in ("t/c.txt", "t/d.txt"):
        Path(name).write_bytes(content)
    # One line for all of a kind.
    again = load_corpus("t").remarks
    assert again == tuple(f"{line}; and so are 2 other files" for line in remarks)
    assert not says or re.search(says, remarks[0])


@pytest.mark.parametrize("folder", [False, True])
def test_a_path_hidden_by_a_named_corpus_is_reported(folder: bool) -> None:
    name = "two-plays"
    path = Path("two-plays/a.txt" if folder else "two-plays")
    assert load_corpus(name).remarks == ()
    path.parent.mkdir(exist_ok=True)
    path.write_text("plain " * 40)
    kind = "folder" if folder else "file"
    (line,) = load_corpus({"train": name, "test": f"{name}#test"}).remarks
    assert line == (
        f"two-plays is the named corpus, not the {kind} of that name here: ./two-plays is that one"
    )
    assert load_corpus(name).remarks == (line,)
    assert load_corpus("./two-plays").remarks == ()


def test_a_named_file_that_is_not_text_is_said() -> None:
    Path("t.bin").write_bytes(bytes(range(256)) * 9)
    assert (
        "t.bin is not text, and its bytes are read as they are" in load_corpus("t.bin").remarks[0]
    )


@pytest.mark.parametrize("kind", ["characters", "words", "subwords"])
def test_other_tokenisers_name_the_file_that_is_not_utf8(kind: str) -> None:
    Path("t").mkdir()
    Path("t/a.txt").write_text("plain " * 40)
    Path("t/b.txt").write_bytes(RUSSIAN.encode("cp1251"))
    with pytest.raises(
        MemspanError, match=r"^t/b\.txt looks like CP1251 .* \(byte 0\): convert it \("
    ):
        prepare("t", kind, progress=False)


def test_words_say_that_tabs_and_indentation_are_lost() -> None:
    for name, text in {"a.txt": "one two\nthree \n" * 40, "b.txt": "if x:\n    y\n" * 40}.items():
        Path(name).write_text(text)
    assert prepare("a.txt", "words").notices() == []
    for _ in ("made", "cached"):
        (line,) = prepare("b.txt", "words").notices()
        assert "words of train, validation, test are parted by one space each: tabs, ind" in line
