"""Mistakes in Python: one line that says what to do, as on the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import memspan
from memspan.models import GatedDeltaNetConfig, LSTMConfig, TransformerXLConfig

pytestmark = pytest.mark.hardening
RUN = "shakespeare"


def model() -> memspan.LanguageModel:
    return memspan.LanguageModel(256, LSTMConfig(n_layers=1, d_model=4))


def memory() -> memspan.Memory:
    return model().initial_memory(2)


def config(**options: Any) -> memspan.RunConfig[Any]:
    return memspan.RunConfig(model=TransformerXLConfig(), **options)


call: Any = memspan
"""Without types, as mistakes are made."""
MISTAKES: dict[str, Callable[[], object]] = {
    # What is needed is missing.
    "generate needs run: the run, or its folder": lambda: call.generate(prompt="a"),
    "generate needs run:": lambda: call.generate(),
    "evaluate needs run: the run, or its folder": lambda: call.evaluate(),
    "load needs folder: the run's": lambda: call.load(),
    "train needs folder: a new folder for it": lambda: call.train(config()),
    "train needs config: all options of the run": lambda: call.train(folder="new"),
    "resume needs folder: the run's": lambda: call.resume(),
    "measure needs run: a run or its folder": lambda: call.measure(),
    "check needs model: an object with": lambda: call.check(),
    "convert needs out: a new folder for the run": lambda: call.convert("folder"),
    "estimate needs config: all options of the run": lambda: call.estimate(),
    "Writer needs run": lambda: call.Writer(),
    # Other types.
    "not 5 (the text to continue": lambda: call.generate(RUN, 5),
    "generate takes text, a list of bytes or a list of texts as prompt": lambda: call.generate(
        prompt=5
    ),
    "or a list of texts as prompt, not b'The'": lambda: call.generate(RUN, b"The"),
    "or a list of texts as prompt, not [5, 6]": lambda: call.generate(RUN, [5, 6]),
    "or a list of texts as prompt, not None": lambda: call.generate(RUN, None),
    "generate takes a Run or a path as run, not a LanguageModel: memspan.save_run(model": lambda: (
        call.generate(model(), "a")
    ),
    "generate takes a Run or a path as run, not 5": lambda: call.generate(5),
    "as tokens, not '5' (tokens to write per sample)": lambda: call.generate(RUN, tokens="5"),
    "as tokens, not 5.5": lambda: call.generate(RUN, tokens=5.5),
    "as tokens, not True": lambda: call.generate(RUN, tokens=True),
    "as samples, not None": lambda: call.generate(RUN, samples=None),
    "takes a Sampling as sampling, not 0.5": lambda: call.generate(RUN, sampling=0.5),
    "takes a Sampling as sampling, not {'top_k': 5}": lambda: call.generate(
        RUN, sampling={"top_k": 5}
    ),
    "as stop, not 5": lambda: call.generate(RUN, stop=5),
    "as memory, not a Tensor": lambda: call.generate(RUN, memory=torch.zeros(2)),
    "as precision, not 'bfloat16'": lambda: call.generate(RUN, precision="bfloat16"),
    "True or False as log_probabilities, not 'yes'": lambda: call.generate(
        RUN, log_probabilities="yes"
    ),
    "evaluate takes a Run or a path as run, not a LanguageModel": lambda: call.evaluate(model()),
    "evaluate takes a path or None as corpus, not ['a'": lambda: call.evaluate(RUN, ["a", "b"]),
    "as corpus, not a Tensor": lambda: call.evaluate(RUN, torch.zeros(5)),
    "as split, not 5": lambda: call.evaluate(RUN, split=5),
    "as batch_size, not '2'": lambda: call.evaluate(RUN, batch_size="2"),
    "evaluate takes a function or None as progress, not True": lambda: call.evaluate(
        RUN, progress=True
    ),
    "load takes a path as folder, not a Run": lambda: call.load(memspan.load(RUN)),
    "load takes text as device, not 0": lambda: call.load(RUN, 0),
    "train takes a RunConfig as config, not {} (all options of the run)": lambda: call.train({}),
    "train takes a RunConfig as config, not a TransformerXLConfig": lambda: call.train(
        TransformerXLConfig(), "new"
    ),
    "train takes a path as folder, not None": lambda: call.train(config(), None),
    "as optimiser, not 'adam'": lambda: call.train(config(), "new", optimiser="adam"),
    "as console, not True": lambda: call.train(config(), "new", console=True),
    "resume takes a path as folder, not a Run": lambda: call.resume(memspan.load(RUN)),
    "as n_processes, not '2'": lambda: call.estimate(config(), n_processes="2"),
    "measure takes an integer as longest, not 64.5": lambda: call.measure(RUN, longest=64.5),
    "measure takes a number as budget, not '9'": lambda: call.measure(RUN, budget="9"),
    "check takes an integer as seed, not 'x'": lambda: call.check(RUN, seed="x"),
    "as laws, not [5]": lambda: call.check(RUN, laws=[5]),
    "there is no law 'cut'": lambda: call.check(RUN, laws="cut"),
    "convert takes a path as source": lambda: call.convert(torch.nn.Linear(2, 2), "new"),
    "as kind, not 'torch'": lambda: call.convert("folder", "new", kind="torch"),
    # Names.
    "write sampling=memspan.Sampling(temperature=...)": lambda: call.generate(RUN, temperature=1),
    "generate has no top_k: write sampling=": lambda: call.generate(RUN, top_k=5),
    "generate has no max_tokens: perhaps tokens is meant": lambda: call.generate(RUN, max_tokens=5),
    "generate has no max_new_tokens: perhaps tokens": lambda: call.generate(RUN, max_new_tokens=5),
    "token is not an option of transformer-xl: perhaps tokens": lambda: call.generate(RUN, token=5),
    "perhaps memory_length is meant": lambda: call.evaluate(RUN, memory_lenght=5),
    "evaluate has no texts: perhaps corpus is meant": lambda: call.evaluate(RUN, texts=3),
    "evaluate has no text: perhaps corpus is meant": lambda: call.evaluate(RUN, text="a"),
    "generate has no texts: perhaps prompt is meant": lambda: call.generate(RUN, texts=["a"]),
    "frobnicate is not an option of transformer-xl: leave it out": lambda: call.generate(
        RUN, frobnicate=5
    ),
    "evaluate has no dataset: perhaps corpus is meant": lambda: call.evaluate(RUN, dataset="a"),
    "generate has no model: perhaps run is meant": lambda: call.generate(model=RUN),
    "Writer has no num_return_sequences: perhaps samples": lambda: call.Writer(
        RUN, num_return_sequences=2
    ),
    "config=memspan.RunConfig(..., train=memspan.TrainConfig(steps=...))": lambda: call.train(
        config(), "new", steps=5
    ),
    "optim=memspan.OptimConfig(learning_rate=...))": lambda: call.train(config(), "new", lr=1e-3),
    "train has no out: perhaps folder is meant": lambda: call.train(config(), out="new"),
    "train has no optimizer: perhaps optimiser is meant": lambda: call.train(
        config(), "new", optimizer=torch.optim.AdamW
    ),
    "measure has no bugdet: perhaps budget is meant": lambda: call.measure(RUN, bugdet=5),
    "check has no law: perhaps laws is meant": lambda: call.check(RUN, law="cuts"),
    "convert has no frobnicate: use source, out, kind": lambda: call.convert("a", frobnicate=1),
    "evaluate takes only run, corpus without a name": lambda: call.evaluate(RUN, "a", "text"),
    "generate was given run twice: drop one": lambda: call.generate(RUN, run=RUN),
    # Options.
    "OptimConfig has no lr: perhaps learning_rate is meant": lambda: call.OptimConfig(lr=1e-3),
    "TrainConfig has no max_steps: perhaps steps is meant": lambda: call.TrainConfig(max_steps=9),
    "TransformerXLConfig has no n_layer: perhaps n_layers": lambda: call.models.TransformerXLConfig(
        n_layer=2
    ),
    "GatedDeltaNetConfig has no memory_length": lambda: config(
        train=GatedDeltaNetConfig(**{"memory_length": 5})
    ),
    "LSTMConfig has no hidden_size: perhaps d_model": lambda: LSTMConfig(**{"hidden_size": 5}),
    "Sampling has no temprature: perhaps temperature": lambda: call.Sampling(temprature=1),
    "RunConfig has no training: perhaps train is meant": lambda: config(
        training=memspan.TrainConfig()
    ),
    "DataConfig has no path": lambda: call.DataConfig(path="text.txt"),
    "EmbeddingConfig has no tied: perhaps tie is meant": lambda: call.EmbeddingConfig(tied=True),
    "Precision has no product: perhaps products": lambda: call.Precision(product="float32"),
    # A memory.
    "reset needs mask": lambda: memory().reset(),  # type: ignore[call-arg]
    "select needs rows": lambda: memory().select(),  # type: ignore[call-arg]
    "replace needs other": lambda: memory().replace([0]),  # type: ignore[call-arg]
    "save needs fingerprint": lambda: memory().save("memory.safetensors"),  # type: ignore[call-arg]
    "reset needs mask: ": lambda: model().eval().reader(batch_size=2).reset(),  # type: ignore[call-arg]
}


@pytest.mark.parametrize("says", MISTAKES)
def test_a_mistake_is_one_line(says: str, own_folders: Path) -> None:
    with pytest.raises(memspan.MemspanError) as caught:
        MISTAKES[says]()
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not [*Path().iterdir()]


def test_laws_may_be_one_name_and_a_corpus_a_path(own_folders: Path) -> None:
    gru = torch.nn.GRU(4, 4, batch_first=True)
    assert [found.law for found in memspan.check(gru, laws="cuts", budget=0.1).findings] == ["cuts"]
    text = Path("text.txt")
    text.write_text("to be, or not to be" * 9, encoding="utf-8")
    by_path, by_name = (memspan.evaluate(RUN, x, split="all") for x in (text, str(text)))
    assert by_path.nats == by_name.nats


def test_a_misspelt_name_of_the_package_is_guessed() -> None:
    with pytest.raises(AttributeError) as caught:
        call.trian  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("trian", memspan)
