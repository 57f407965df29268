"""Models of the library transformers in the recall experiment, as it trains and scores memspan's."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

# About width ** -0.5: from the usual 0.02 such narrow models begin to learn late.
_SHARED: dict[str, Any] = {
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}


def sliding_llama(n_layers: int, width: int, inner: int, window: int) -> Any:
    """Llama whose attention sees a window: Mistral's config, which is that."""
    from transformers import MistralConfig

    return MistralConfig(
        **_SHARED,
        num_hidden_layers=n_layers,
        hidden_size=width,
        intermediate_size=inner,
        num_attention_heads=4,
        num_key_value_heads=4,
        # A token sees itself and window - 1 before it.
        sliding_window=window + 1,
        # Positions are rotations; nothing is as long as this.
        max_position_embeddings=2**30,
    )


def mamba2(n_layers: int, width: int) -> Any:
    """Mamba-2 of an even width: four heads of half of it, with states of 64 numbers for each place."""
    from transformers import Mamba2Config

    return Mamba2Config(
        **_SHARED,
        num_hidden_layers=n_layers,
        hidden_size=width,
        num_heads=4,
        head_dim=width // 2,
        expand=2,
        state_size=64,
        n_groups=1,
        # Of 16, 32 and 64, what its reference implementation, which CPUs use, is fast at.
        chunk_size=64,
    )


@dataclass
class Carried:
    """A cache of transformers."""

    cache: Any

    def detach(self) -> Carried:
        """The same state without its graph, in a cache of its own: caches change in place."""
        # A copy takes for its parts what it is told that it has copied.
        return Carried(copy.deepcopy(self.cache, {id(t): t.detach() for t in tensors(self.cache)}))


def tensors(part: Any) -> Iterator[Tensor]:
    """The tensors in a cache: in its layers, their attributes, and lists and dictionaries there."""
    if isinstance(part, Tensor):
        yield part
        return
    inner = part if isinstance(part, dict) else getattr(part, "__dict__", {})
    for each in part if isinstance(part, list | tuple) else inner.values():
        yield from tensors(each)


@dataclass
class Output:
    """Output as the experiment reads it."""

    logits: Tensor
    memory: Carried
    losses: Tensor | None = None
    loss: Tensor | None = None


class Peer(nn.Module):
    """A causal language model with its cache as its memory."""

    def __init__(self, config: Any, vocab_size: int) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM

        config.vocab_size = vocab_size
        self.model = AutoModelForCausalLM.from_config(config)
        # Called so since transformers 5.24.
        taken = inspect.signature(self.model.forward).parameters
        names = ("cache", "cache_params", "past_key_values")
        self.argument = next(name for name in names if name in taken)

    def initial_memory(self, batch_size: int) -> None:
        """A model makes its cache when it first reads."""

    def forward(
        self, tokens: Tensor, memory: Carried | None, targets: Tensor | None = None
    ) -> Output:
        """``tokens`` int64 ``[B, T]``; losses are those of ``targets`` that are not negative."""
        past = {} if memory is None else {self.argument: memory.cache}
        found = self.model(input_ids=tokens, use_cache=True, **past)
        out = Output(found.logits, Carried(found[self.argument]))
        if targets is not None:
            out.losses = nn.functional.cross_entropy(
                out.logits.transpose(1, 2), targets, ignore_index=-100, reduction="none"
            )
            out.loss = out.losses.sum() / (targets != -100).sum()
        return out

    def clip_groups(self) -> list[list[nn.Parameter]]:
        return [list(self.parameters())]
