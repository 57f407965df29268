"""``memspan export RUN --to transformers DIR``, and what the folder is good for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import memspan
import pages
import tiny_runs
from command_line import refused
from memspan.errors import MemspanError
from memspan.lab import cli
from memspan.lab.converters.exported import read_tokenizer
from memspan.lab.data.tokenizers.plain import ByteTokenizer, CharacterTokenizer, WordTokenizer
from memspan.lab.data.tokenizers.registry import train_tokenizer
from memspan.lab.integrations.transformers import export, fast_tokenizer, from_run

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "transformers.md"
GREEDY = memspan.Sampling(temperature=0)
FILES = [
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]
PROGRAM = """
import sys, warnings
import memspan.lab.integrations.transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer, pipeline

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
inputs = tokenizer(sys.argv[2], return_tensors="pt")
streamer = TextStreamer(tokenizer, skip_prompt=True)
model.generate(**inputs, max_new_tokens=12, do_sample=False, streamer=streamer)
write = pipeline("text-generation", model=sys.argv[1])
for text in (sys.argv[2], ["m", "memory is"]):
    print(write(text, max_new_tokens=12, do_sample=False, return_full_text=False))
"""


@pytest.fixture
def run(tiny_text: None) -> Path:
    return memspan.train(tiny_runs.OPTIONS, "runs/book")


@pytest.mark.smoke
@pytest.mark.processes
def test_a_new_process_writes_what_memspan_writes(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["export", str(run), "--to", "transformers", "out/exported"])
    assert "exported to out/exported" in capsys.readouterr().out
    assert sorted(path.name for path in Path("out/exported").iterdir()) == FILES
    assert len({path.stat().st_mode for path in Path("out/exported").iterdir()}) == 1
    assert "out" not in json.loads(Path("out/exported/config.json").read_text())
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, "out/exported", "memory "],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert found.returncode == 0, found.stderr

    def ours(prompt: str) -> str:
        return memspan.generate(run, prompt, tokens=12, sampling=GREEDY).text

    one = str([{"generated_text": ours("memory ")}])
    two = str([[{"generated_text": ours(prompt)}] for prompt in ("m", "memory is")])
    assert found.stdout == f"{ours('memory ')}\n{one}\n{two}\n"


def test_the_card_s_code_runs(run: Path) -> None:
    export(run, "exported")
    assert pages.run(Path("exported/README.md"))


def test_python_gives_the_same_model(run: Path) -> None:
    model, tokenizer = from_run(memspan.load(run))
    assert model.config.parts() == (tiny_runs.OPTIONS.model, tiny_runs.OPTIONS.embedding)
    # Longer than what is read at once.
    prompt = tiny_runs.TEXT[:600]
    inputs = tokenizer(prompt, return_tensors="pt")
    written = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    ours = memspan.generate(run, prompt, tokens=8, sampling=GREEDY).text
    assert tokenizer.decode(written[0]) == prompt + ours
    inputs = tokenizer("memory", return_tensors="pt")
    options = {"do_sample": True, "stop_strings": "e", "tokenizer": tokenizer}
    written = model.generate(**inputs, max_new_tokens=200, **options)
    assert ord("e") not in written[0, 6:-1]


def test_a_folder_that_exists_is_left_alone(run: Path) -> None:
    Path("taken").mkdir()
    with pytest.raises(MemspanError, match="taken exists already: choose another folder"):
        export(run, "taken")
    Path("file").touch()
    with pytest.raises(MemspanError, match="cannot write file/out"):
        export(run, "file/out")
    with pytest.raises(MemspanError, match="no run at nothere"):
        export("nothere", "out")
    assert sorted(os.listdir()) == ["cache", "file", "runs", "taken", "text.txt"]


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set:UserWarning")
def test_guide_trains_with_the_library(run: Path) -> None:
    names = pages.run(GUIDE)
    trainer = names["trainer"]
    n_steps = names["n_steps"]
    assert trainer.state.global_step == n_steps > 10
    # Every stream was read to its end, in order.
    assert trainer.memory.tokens_seen.tolist() == [n_steps * names["length"]] * names["rows"]
    assert trainer.evaluate(names["segments"])["eval_loss"] > 0
    model = names["model"].eval()
    inputs = names["inputs"]
    targets = names["targets"]
    trained = AutoModelForCausalLM.from_pretrained("exported/finetuned")
    before = AutoModelForCausalLM.from_pretrained("exported/book")
    with torch.no_grad():
        losses = [
            float(m(inputs.flatten(1), shift_labels=targets.flatten(1)).loss)
            for m in (model, trained, before)
        ]
    assert losses[0] == losses[1] < losses[2]
    assert json.loads(Path("exported/finetuned/config.json").read_text())["model_type"] == "memspan"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--to", "transformers"], "--to transformers needs the name of a new folder: add it"),
        (["out"], "out is a folder to export to: name the library with --to transformers"),
        (["--to", "jax", "out"], "argument '--to'. Expected one of"),
    ],
)
def test_mistakes_on_the_command_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert line in refused(capsys, "export", "run", *arguments)


@pytest.mark.smoke
@pytest.mark.usefixtures("own_folders")
def test_a_fine_tuned_folder_becomes_a_run_again() -> None:
    export("shakespeare-fast-weights", "exported")
    model = AutoModelForCausalLM.from_pretrained("exported")
    with torch.no_grad():
        model.get_input_embeddings().weight[0] += 1
    model.save_pretrained("exported")
    run = memspan.load(memspan.convert("exported", "runs/back"))
    assert run.model.fingerprint() == model.model.fingerprint()
    before = memspan.load("shakespeare-fast-weights")
    assert run.tokenizer.vocabulary_hash == before.tokenizer.vocabulary_hash
    for section in ("model", "embedding"):
        assert getattr(run.config, section) == getattr(before.config, section)
    assert run.config.train.segment_length == before.config.train.segment_length
    model.resize_token_embeddings(257)
    model.save_pretrained("exported")
    with pytest.raises(MemspanError, match=r"call its resize_token_embeddings\(256\)"):
        memspan.convert("exported", "runs/other")


WORDS = "the fox saw a fox\n and then\tit did not"
KINDS = {
    "bytes": ByteTokenizer(),
    "some-bytes": ByteTokenizer([*b"the fox"]),
    "characters": CharacterTokenizer(" aefhotx"),
    "no-other-characters": CharacterTokenizer(" aefhotx", others=False),
    "words": WordTokenizer(["<eos>", "<unk>", "the", "fox"]),
    "lower-case": WordTokenizer(["the", "<unk>", "fox"], lower_case=True),
    "subwords": train_tokenizer("subwords", [WORDS.encode() * 9], 270),
}


@pytest.mark.parametrize("kind", KINDS)
def test_tokenisers_come_back_as_they_were(kind: str, tmp_path: Path) -> None:
    fast_tokenizer(KINDS[kind]).save_pretrained(tmp_path)
    found = read_tokenizer(tmp_path / "tokenizer.json")
    assert type(found) is type(KINDS[kind])
    assert found.vocab_size == KINDS[kind].vocab_size
    if kind != "subwords":
        assert found.content() == KINDS[kind].content()
    text = b"the fox" if kind in ("some-bytes", "no-other-characters") else b"The fox\nthe hare"
    assert found.encode(text).tolist() == KINDS[kind].encode(text).tolist()


def test_a_damaged_tokeniser_is_one_line(tmp_path: Path) -> None:
    for content in ("{}", '{"model": {"type": "BPE", "vocab": {"a": []}}, "pre_tokenizer": 1}'):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(MemspanError, match="that memspan exported"):
            read_tokenizer(tmp_path / "tokenizer.json")
