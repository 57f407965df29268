"""Runs as models of the evaluation harness."""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance

import memspan
from architectures import CASES, ONE_OF_EACH
from memspan.errors import MemspanError
from memspan.lab.data.tokenizers.base import Tokenizer
from memspan.lab.data.tokenizers.plain import ByteTokenizer
from memspan.lab.data.tokenizers.registry import train_tokenizer
from memspan.lab.evaluation import score_tokens
from memspan.lab.integrations.lm_eval import MemspanLM
from memspan.models import LanguageModel, Reader
from pages import blocks

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "lm-eval.md"
TEXT = "Memory is what remains of what was read. " * 2
TEXTS = (TEXT, "a", "", TEXT[:50], "Memory is made of tokens.")
every_architecture = pytest.mark.parametrize("name", ONE_OF_EACH)


def run_of(name: str, tokenizer: Tokenizer | None = None) -> memspan.Run:
    """A run of random weights in float64."""
    backbone = CASES[ONE_OF_EACH[name]].backbone
    tokenizer = tokenizer or ByteTokenizer()
    torch.manual_seed(1)
    model = LanguageModel(tokenizer.vocab_size, backbone).double().eval()
    train = memspan.TrainConfig(segment_length=6)
    config = memspan.RunConfig(backbone, architecture=name, train=train)
    return memspan.Run(Path("random"), config, tokenizer, model, 0, {})


def asked(model: MemspanLM, kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    """The answers to requests of one kind."""
    requests = [Instance(kind, {}, one, n) for n, one in enumerate(arguments)]
    answers: list[Any] = getattr(model, kind)(requests, disable_tqdm=True)
    return answers


def documents(model: MemspanLM) -> list[float]:
    return asked(model, "loglikelihood_rolling", *((text,) for text in TEXTS))


@every_architecture
def test_a_document_scores_as_by_evaluate_whatever_the_cut(name: str) -> None:
    run = run_of(name)
    by_length = {}
    for length in (3, 6):
        scores = by_length[length] = documents(MemspanLM(run, segment_length=length))
        for text, score in zip(TEXTS, scores, strict=True):
            tokens = run.tokenizer.encode(text.encode())
            size = min(length, len(text))
            # evaluate() refuses a text that is empty.
            nats = size and score_tokens(run.model, tokens, run.tokenizer, segment_length=size).nats
            assert score == pytest.approx(-nats, rel=1e-9)
        side_by_side = documents(MemspanLM(run, batch_size="3", segment_length=length))
        assert side_by_side == pytest.approx(scores, rel=1e-9)
    if CASES[ONE_OF_EACH[name]].cut_invariant:
        assert by_length[3] == pytest.approx(by_length[6], rel=1e-9)
    assert documents(MemspanLM(run)) == by_length[6]


@every_architecture
def test_continuations_score_as_by_the_model_itself(name: str) -> None:
    run = run_of(name)
    context = "Memory"
    endings = (" is", " remains!", " is")
    model = MemspanLM(run, batch_size=2)
    scores = asked(model, "loglikelihood", *((context, ending) for ending in endings))
    for ending, (score, greedy) in zip(endings, scores, strict=True):
        reader = run.model.reader()
        reader.read(torch.tensor([list(context[:-1].encode())]))
        tokens = torch.tensor([list((context[-1] + ending).encode())])
        # Segments of 6, as in training.
        logits = torch.cat([reader.read(part) for part in tokens[:, :-1].split(6, 1)], 1)
        expected = logits.log_softmax(2).gather(2, tokens[:, 1:, None]).sum().item()
        assert score == pytest.approx(expected, rel=1e-6)
        assert greedy == (logits.argmax(2) == tokens[:, 1:]).all()
    # Without a context, after what generate() opens with.
    alone, opened = (
        asked(model, "loglikelihood", *((context, text) for text in TEXTS if text))
        for context in ("", "\n")
    )
    assert alone == opened


def test_a_context_is_read_once_for_all_that_follows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MemspanLM(run_of("feedback"))
    read = Reader.read
    n_read = []

    def counting(reader: Reader, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
        n_read.append(tokens.numel())
        return read(reader, tokens, **options)

    monkeypatch.setattr(Reader, "read", counting)
    asked(model, "loglikelihood", *((TEXT, f" {n}") for n in range(5)))
    assert sum(n_read) == len(TEXT) - 1 + 5 * 2


@pytest.mark.parametrize("kind", ["words", "subwords"])
def test_a_token_across_the_border_is_scored(kind: str) -> None:
    tokenizer = train_tokenizer(kind, [TEXT.encode()], 280)
    model = MemspanLM(run_of("lstm", tokenizer))
    joined, apart = asked(model, "loglikelihood", ("Memory ", "is what"), ("Memory", " is what"))
    assert joined == apart
    assert joined[0] < 0


def test_a_context_may_end_inside_an_unknown_word() -> None:
    """The word, which begins in the context and ends in the continuation, is scored."""
    model = MemspanLM(run_of("lstm", train_tokenizer("words", [TEXT.encode()])))
    pairs = [
        ("Memory qu", "agga"),
        ("Memory qu", "agga is"),
        ("qu", "agga"),
        ("Memory", " quagga is"),
    ]
    one, two, alone, whole = asked(model, "loglikelihood", *pairs)
    assert two == whole
    assert 0 > one[0] > two[0]
    assert alone[0] < 0
    characters = MemspanLM(run_of("lstm", train_tokenizer("characters", [TEXT.encode()])))
    odd, known = asked(characters, "loglikelihood", ("é", "a"), ("\0", "a"))
    assert odd == known


def test_unknown_tokens_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    model = MemspanLM(run_of("lstm", train_tokenizer("words", [TEXT.encode()])))
    asked(model, "loglikelihood_rolling", ("Memory is what",))
    assert not caplog.messages
    asked(model, "loglikelihood_rolling", ("Memory is strange",), ("so is what",))
    asked(model, "loglikelihood", ("strange", " is odd"))
    assert [line.partition(" are")[0] for line in caplog.messages] == [
        "2 of 6 scored tokens",
        "1 of 2 scored tokens",
    ]


def test_texts_are_those_of_generate() -> None:
    model = MemspanLM("shakespeare", batch_size=2)
    context = "ROMEO:\nWhat is"
    length = {"max_gen_toks": 30}
    greedy = memspan.generate(
        "shakespeare", context, tokens=30, sampling=memspan.Sampling(temperature=0)
    ).text
    assert greedy == " the seem the sent the sent th"
    torch.manual_seed(1)
    sampled = {"do_sample": True, "temperature": 0.8, "top_k": 5, **length}
    whole, again, up_to_the_first, nothing, *drawn = asked(
        model,
        "generate_until",
        (context, length),
        (context, {"until": [None, ""], **length}),
        (context, {"until": ["'", "sent", "trym"], "do_sample": False, **length}),
        (context, {"until": " ", "max_tokens": 30}),
        (context, sampled),
        (context, sampled),
    )
    assert whole == again == greedy
    assert (up_to_the_first, nothing) == (" the seem the ", "")
    assert drawn[0] != drawn[1]
    torch.manual_seed(1)
    assert asked(model, "generate_until", (context, sampled)) == drawn[:1]
    scored = asked(model, "loglikelihood", (context, greedy), (context, greedy[:9]))
    assert scored == [(pytest.approx(-23, abs=20), True)] * 2


def of_a_task(kind: str, *request: Any) -> Any:
    return asked(MemspanLM(run_of("lstm")), kind, request)


MISTAKES: dict[str, Callable[[], Any]] = {
    "say which run to evaluate: run=FOLDER": lambda: MemspanLM(),
    "no run at nothere": lambda: MemspanLM("nothere"),
    "memory_lenght is not an option of ": lambda: MemspanLM("shakespeare", memory_lenght=3),
    "batch_size must be a number, at least 1": lambda: MemspanLM("shakespeare", "auto"),
    "there is no device 'gpu' here": lambda: MemspanLM("shakespeare", device="gpu"),
    "there is nothing to score after 'Memory'": lambda: of_a_task("loglikelihood", "Memory", ""),
    "half a surrogate pair, '.ud800', at character 1": lambda: of_a_task(
        "loglikelihood", "a\ud800", " b"
    ),
    "num_beams is not an option of generation here": lambda: of_a_task(
        "generate_until", "a", {"num_beams": 4}
    ),
    "max_gen_toks must be a number": lambda: of_a_task("generate_until", "a", {"max_gen_toks": 0}),
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_in_arguments_and_tasks(line: str) -> None:
    with pytest.raises(MemspanError, match=line):
        MISTAKES[line]()


@pytest.mark.processes
def test_the_guide_runs_without_a_network(own_folders: Path) -> None:
    page = GUIDE.read_text()
    shutil.copytree(ROOT / "examples" / "lm_eval", own_folders, dirs_exist_ok=True)
    assert Path("plays.yaml").read_text().endswith(page.split("```yaml\n")[1].split("```")[0])
    [python] = [block for language, block in blocks(GUIDE) if language == "python"]
    [command] = re.findall(r"^python -P -m (.*)", page.replace("\\\n", ""), re.M)
    then = f"import runpy, sys; sys.argv = {shlex.split(command)}"
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(own_folders)}
    program = f"{python}\n{then}; runpy.run_module(sys.argv[0], run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | offline, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    printed = {line.split()[0]: float(line.split()[1]) for line in done.stdout.splitlines()[:2]}
    texts = [json.loads(line)["text"] for line in Path("plays.jsonl").read_text().splitlines()]
    for length in (16, 64):
        nats = 0.0
        for text in texts:
            Path("text.txt").write_text(text)
            run = memspan.load("shakespeare")
            of_all = {"split": "all", "memory_length": length}
            nats += memspan.evaluate(run, "text.txt", **of_all).nats
        bits = nats / math.log(2) / sum(map(len, texts))
        assert printed[str(length)] == pytest.approx(bits, rel=1e-6)
    assert printed["64"] < printed["16"]
    # How many digits the table has depends on the release of its writer.
    [in_table] = re.findall(r"\d\.\d+", done.stdout.partition("bits_per_byte")[2].splitlines()[0])
    assert float(in_table) == pytest.approx(printed["64"], abs=0.001)


def test_a_mistake_on_the_command_line_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: MemspanLM("nothere"))
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module("memspan.lab.integrations.lm_eval", run_name="__main__")
    assert capsys.readouterr().err.startswith("memspan: no run at nothere: check the path")
