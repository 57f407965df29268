"""The code of README, tutorial, guides, lessons and annotated pages runs as it stands, in small."""

from __future__ import annotations

import dataclasses
import functools
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

import memspan
import transfo_xl_folder
from memspan.lab import cli
from memspan.models import TransformerXLConfig
from pages import blocks

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OTHERS = {DOCS / "guides" / f"{name}.md" for name in ("agents", "lm-eval", "transformers")}
"""Guides whose code has a test in tests/integrations."""
OTHERS |= {DOCS / "state-in-ci.md"}
"""It needs a model of the reader's own."""
NEEDS = {"lm_eval": "lm_eval.api", "torchrl": "torchrl", "transformers": "transformers"}
"""Libraries that examples of the reference need; examples/lm_eval is a folder, too."""
PAGES = [
    ROOT / "README.md",
    DOCS / "index.md",
    DOCS / "ask.md",
    DOCS / "tutorial.md",
    DOCS / "path.md",
    DOCS / "today.md",
    *sorted({*(DOCS / "guides").glob("*.md")} - OTHERS),
    *sorted((DOCS / "lessons").glob("*.md")),
    *(page for page in sorted((DOCS / "annotated").glob("*.md")) if blocks(page)),
    *sorted((DOCS / "reference").glob("*.md")),
]
NOT_RUN = {
    r"make |pip install|PIP_EXTRA_INDEX_URL=": "installs, or runs this suite",
    r"cat .* \| memspan train --data.corpus -": "standard input: tests/commands has it",
    r"python -P -m memspan.lab.integrations.lm_eval": "test_lm_eval.py runs it",
    r"memspan (--version|train --help|data list|generate shakespeare)$": "other tests run them",
    r"memspan check ": "tests/commands/test_check.py and tests/integrations have it",
    r"memspan export runs/book --to transformers": "tests/integrations has it",
    r"python examples/(ppo|serve).py": "test_ppo.py and test_serve.py run them",
    r"python benchmarks/relative_kernel.py": "tests/ops/test_relative_kernel.py has it",
    r"python benchmarks/feedback_kernel.py": "tests/ops/test_feedback_kernel.py has it",
    r"python tests/vectors.py": "tests/models/test_vectors.py has it",
    r".*--nproc": "starts processes: tests/distributed has it",
    r".*enwik8": "a download, and days of training",
}
"""Lines of blocks ``sh`` that are not run here, and why. A new line is run or is one of these."""
BOOK = "Once upon a time there was a fox. " * 60
SIZES = {
    "train": "--train.steps 2 --train.batch-size 2 --train.segment-length 8 --train.device cpu "
    "--train.evaluate-tokens 16 --train.sample-tokens 4 ",
    "generate": "--tokens 4",
    "evaluate": "--tokens 64",
    "measure": "--longest 16 --budget 1",
}
MODEL = "--model.n-layers 1 --model.d-model 16 "
ATTENTION = "--model.n-heads 2 --model.d-ff 16 "
BUDGETS = {"--train.epochs": "0.02", "--train.max-tokens": "32"}


def commands(block: str) -> list[list[str]]:
    """The lines for ``memspan``, without comments and without what is large or has other tests."""
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    return [
        small(line[1:])
        for line in lines
        if line[:1] == ["memspan"] and not any(re.match(lines, " ".join(line)) for lines in NOT_RUN)
    ]


def small(arguments: list[str]) -> list[str]:
    """A command with the sizes of a test: the second counts where a flag is given twice."""
    verb = arguments[0]
    given = {*arguments}
    sizes = SIZES.get(verb, "")
    if "--resume" in given:
        sizes = "--train.steps 4" if "--train.steps" in given else "--train.steps 3"
    elif verb == "train":
        if not {"--import", "--preset", "--init-from"} & given:
            sizes += MODEL if "lstm" in given else MODEL + ATTENTION
        if not {"--data.corpus", "--data.train", "--preset"} & given:
            sizes += "--data.corpus book.txt "
        for flag in BUDGETS.keys() & given:
            sizes = sizes.replace("--train.steps 2 ", "") + f"{flag} {BUDGETS[flag]} "
    return [*arguments, *sizes.split()]


@pytest.fixture
def folder(own_folders: Path, own_architectures: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the texts that the pages name, in which trainings are small."""
    Path("book.txt").write_text(BOOK)
    Path("texts").mkdir()
    for n in range(3):
        Path(f"texts/{n}.txt").write_text(BOOK[n:])
    shutil.copyfile(ROOT / "examples" / "own_architecture.py", "own_architecture.py")
    tensors = transfo_xl_folder.random_tensors(transfo_xl_folder.OPTIONS)
    transfo_xl_folder.write(Path("transfo-xl-wt103"), transfo_xl_folder.OPTIONS, tensors)
    monkeypatch.syspath_prepend(str(own_folders))
    whole_size = memspan.train

    def tiny(config: memspan.RunConfig[Any], folder: str, **options: Any) -> Path:
        train = memspan.TrainConfig(
            steps=1, batch_size=2, segment_length=8, evaluate_tokens=16, device="cpu"
        )
        model = TransformerXLConfig(n_layers=1, d_model=16, d_ff=16, n_heads=2)
        return whole_size(dataclasses.replace(config, model=model, train=train), folder, **options)

    monkeypatch.setattr(memspan, "train", tiny, raising=False)
    quick = functools.partial(memspan.measure, budget=1, longest=16)
    monkeypatch.setattr(memspan, "measure", quick, raising=False)
    return own_folders


# Tracing for torch.compile warns of this; it is not ours.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_the_code_of_a_page_runs(page: Path, folder: Path) -> None:
    """Blocks run in order, Python's in one namespace: a page is read from top to bottom."""
    if page.parent.name == "reference" and page.stem in NEEDS:
        pytest.importorskip(NEEDS[page.stem])
    names: dict[str, Any] = {}
    ran = 0
    for language, block in blocks(page):
        if language == "python":
            if "memspan.train(" in block:
                shutil.rmtree("runs", ignore_errors=True)
            elif re.search(r'\.(load|evaluate)\("runs', block) and not Path("runs/book").exists():
                data = memspan.DataConfig("book.txt")
                memspan.train(memspan.RunConfig(TransformerXLConfig(), data=data), "runs/book")
            exec(compile(block, str(page), "exec"), names)
            ran += 1
        for command in commands(block) if language == "sh" else []:
            cli.main(command)
            ran += 1
    # An architecture that a page registers would keep these, readers among them.
    ours = [name for name, x in names.items() if type(x).__module__.startswith("memspan.")]
    for name in ours:
        del names[name]
    assert ran, f"{page.name} has no code to run"


def test_every_command_and_snippet_is_run_or_listed() -> None:
    unknown = []
    for page in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))):
        for language, block in blocks(page):
            if language == "python":
                if page not in {*PAGES, *OTHERS}:
                    unknown.append(f"{page.name}: {block[:60]}")
                continue
            for line in block.splitlines():
                words = shlex.split(line, comments=True)
                ours = page in PAGES and words[:1] == ["memspan"]
                if words and not ours and not any(re.match(k, " ".join(words)) for k in NOT_RUN):
                    unknown.append(f"{page.name}: {line}")
    assert not unknown
