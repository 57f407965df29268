"""A text for each split, in place of a corpus that is cut."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import memspan
from command_line import SMALL, refused
from memspan.errors import MemspanError
from memspan.lab import cli
from memspan.lab.data.corpora import load_corpus, located
from memspan.lab.data.options import DataConfig
from memspan.lab.runs.options import load_config

OWN = ["--data.train", "a.txt", "--data.validation", "v/*.txt"]


@pytest.fixture(autouse=True)
def _texts(own_folders: Path) -> None:
    Path("a.txt").write_text("to train on. " * 100)
    Path("v").mkdir()
    Path("v/1.txt").write_text("to validate with. " * 10)
    Path("v/2.txt").write_text("and more. " * 10)
    Path("t.txt").write_text("for later. " * 10)
    Path("a#b.txt").write_text("text")


@pytest.mark.parametrize(
    ("texts", "sizes"),
    [
        ({"train": "a.txt", "validation": "v/*.txt", "test": "t.txt"}, [1300, 280, 110]),
        # Without validation the end of the training text serves as one.
        ({"train": "a.txt"}, [1170, 65, 65]),
        ({"train": "a.txt", "test": "t.txt"}, [1170, 130, 110]),
        # A name may have a hash.
        ({"validation": "a#b.txt"}, [4]),
        # Of what has splits, the one of that name, another that is named, or the only one.
        ({"train": "two-plays#validation", "validation": "two-plays#train"}, [5577, 100_386]),
        ({"train": "two-plays", "validation": "t.txt"}, [100_386, 110]),
        ({"train": "tiny-shakespeare-held-out", "validation": "t.txt"}, [111_540, 110]),
    ],
)
def test_each_split_is_all_of_its_text(texts: dict[str, str], sizes: list[int]) -> None:
    corpus = load_corpus(texts)
    assert [sum(map(len, split)) for split in corpus.splits.values()] == sizes
    assert corpus.record["name"] == ", ".join(f"{split} {name}" for split, name in texts.items())


def test_paths_are_made_absolute_and_other_names_are_not() -> None:
    assert located("v#b") == str(Path.cwd() / "v#b")
    assert located("two-plays#test") == "two-plays#test"


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        ({"train": "a.txt", "validation": "*.txt"}, "a.txt is both in train, a.txt, and in valid"),
        ({"train": "a.txt#test"}, "a.txt is there, but is not divided into splits: drop #test"),
        ({"train": "two-plays#tst"}, r"no split tst: .*two-plays#train \(train, validation, test"),
        ({"train": "a.txt", "validation": "nowhere"}, "no corpus, file, folder or glob 'nowhere'"),
        ({"corpus": "a", "train": "b"}, "corpus a would be split, and train b is a split"),
        ({"validation": "b", "test": "c"}, "validation and test go with train"),
        ({"train": "-"}, "standard input can be the corpus"),
        ({"train": "a\n"}, "train's name 'a\\\\n' has control characters"),
    ],
)
def test_refuses_texts_that_are_no_splits(texts: dict[str, str], says: str) -> None:
    with pytest.raises(MemspanError, match=says):
        load_corpus(DataConfig(**texts).texts)


def test_a_run_reads_its_own_files(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["train", *OWN, "--out", "run", *SMALL])
    data = load_config(Path("run")).data
    here = Path.cwd()
    assert (data.corpus, data.test) == (None, None)
    assert (data.train, data.validation) == (str(here / "a.txt"), str(here / "v/*.txt"))
    capsys.readouterr()
    cli.main(["evaluate", "run", "--json"])
    scores = json.loads(capsys.readouterr().out)
    assert scores["tokens"] == 280
    assert scores["as_in_training"]
    assert memspan.evaluate("run", split="train").tokens == 1300
    # Moved: the validation text is scored without it, and training goes on where it is.
    Path("a.txt").rename("b.txt")
    assert memspan.evaluate("run").as_in_training
    line = refused(capsys, "evaluate", "run", "--split", "train")
    assert "the train text of run is not at" in line
    more = ["train", "--resume", "run", "--train.steps", "8"]
    assert "with --data.train PATH" in refused(capsys, *more)
    cli.main([*more, "--data.train", "b.txt"])
    assert load_config(Path("run")).data == dataclasses.replace(data, train=str(here / "b.txt"))
    # Changed.
    text = Path("b.txt").read_text()
    for path, content, split in (
        ("b.txt", text.upper(), "train"),
        ("v/3.txt", "new", "validation"),
    ):
        Path(path).write_text(content)
        line = refused(capsys, "train", "--resume", "run", "--train.steps", "9")
        assert f"(its {split} split is another text)" in line
        Path("b.txt").write_text(text)
    assert memspan.evaluate("run").as_in_training is False


def test_flags_replace_a_preset_s_text() -> None:
    Path("mine.toml").write_text('[data]\ncorpus = "nowhere.txt"\n')
    cli.main(["train", "--preset", "mine.toml", *OWN, "--out", "own", *SMALL])
    assert load_config(Path("own")).data.corpus is None
    again = ["train", "--preset", "own/config.toml", "--data.corpus", "t.txt", "--out", "again"]
    cli.main([*again, "--train.evaluate-tokens", "4", "--train.segment-length", "4"])
    assert load_config(Path("again")).data == DataConfig(corpus=str(Path.cwd() / "t.txt"))
