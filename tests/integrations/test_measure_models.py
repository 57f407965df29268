"""Models in transformers' format, measured: their caches, windows and tokenisers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tokenizers
import transformers
from packaging import version

import memspan
from memspan.errors import MemspanError
from memspan.lab.data.tokenizers.pretrained import PretrainedTokenizer
from memspan.lab.data.tokenizers.registry import train_tokenizer
from memspan.lab.integrations.transformers import export, fast_tokenizer

TEXT = "".join(f"{n} is followed by {n + 1}, and then by {n + 2}. " for n in range(400))
pytestmark = pytest.mark.usefixtures("one_round", "own_folders")


def gpt2(**sizes: int) -> None:
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, **sizes)
    transformers.GPT2LMHeadModel(config).save_pretrained("model")


@pytest.mark.smoke
def test_an_exported_run_has_the_span_of_the_run() -> None:
    """Read through the cache, by its own tokeniser."""
    name = "shakespeare-fast-weights"
    export(name, "exported")
    own, other = (
        memspan.measure(target, "tiny-shakespeare-held-out", longest=256, budget=1000)
        for target in (name, "exported")
    )
    assert other.tokenizer == "transformers"
    assert own.span is not None
    assert np.allclose(own.span.losses, other.span.losses, atol=1e-4)
    assert other.span == own.span
    # The memory, the logits after the last token and nothing of the model.
    logits = 4 * 256
    assert other.state_bytes == own.state_bytes + logits


def test_a_table_of_positions_is_a_window() -> None:
    gpt2(vocab_size=256, n_positions=24, eos_token_id=0)
    found = memspan.measure("model", longest=128, budget=1000)
    assert found.tokenizer == "bytes"
    assert found.window == 24
    assert found.state_bytes == 2 * 24 * 16 * 4
    # What is further back than the window changes nothing.
    assert np.allclose(found.span.losses[..., -1], found.span.losses[..., -2], atol=1e-5)
    assert not np.allclose(found.span.losses[..., -1], found.span.losses[..., 3], atol=1e-5)


@pytest.mark.skipif(
    version.parse(transformers.__version__) < version.parse("5.17"),
    reason="Mamba-2 cannot read on by several tokens in transformers 5.10",
)
def test_a_random_model_of_a_type() -> None:
    found = memspan.measure("transformers:mamba2", longest=32, budget=1000)
    assert found.span.low <= found.span.tokens <= found.span.high
    assert found.state_bytes > 0


def test_subwords_with_a_token_before_the_text() -> None:
    """Bytes are those of the text, wherever it is cut; what stands before every text is no history."""
    fast = fast_tokenizer(train_tokenizer("subwords", [TEXT.encode()], 300))
    fast.add_special_tokens({"bos_token": "<s>"})
    (first,) = fast.convert_tokens_to_ids(["<s>"])
    fast.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", first)]
    )
    fast.save_pretrained("model")
    tokenizer = PretrainedTokenizer(Path("model"))
    assert tokenizer.prefix == (first,)
    ids = tokenizer.encode(TEXT.encode())
    assert tokenizer.decode(ids) == TEXT.encode()
    assert sum(len(tokenizer.decode(part)) for part in np.array_split(ids, 9)) == len(TEXT)
    gpt2(vocab_size=tokenizer.vocab_size)
    Path("text.txt").write_text(TEXT)
    found = memspan.measure("model", "text.txt", split="all", longest=32, budget=1000)
    assert found.tokenizer == "transformers"
    bits = np.log2(tokenizer.vocab_size) * found.span.targets
    n_bytes = found.span.losses[..., 0].sum() / np.log(2) / found.span.points[0].bits_per_byte
    assert 0.8 < n_bytes / (len(TEXT) / len(ids) * found.span.targets) < 1.2
    assert 0.9 < found.span.points[0].bits_per_byte * n_bytes / bits < 1.1


def test_a_vocabulary_without_a_tokeniser() -> None:
    gpt2(vocab_size=1000)
    with pytest.raises(MemspanError, match="1,000 tokens and no tokeniser"):
        memspan.measure("model")
