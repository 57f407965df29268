"""A model's options as transformers keeps them, in ``config.json``."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, cast

from transformers import PreTrainedConfig

from memspan.errors import MemspanError
from memspan.lab.converters.exported import UNTIED
from memspan.lab.runs.options import DEFAULT_ARCHITECTURE, section
from memspan.models.options import BackboneConfig, EmbeddingConfig
from memspan.models.registry import MODELS


class MemspanConfig(PreTrainedConfig):
    """The options of a :class:`MemspanForCausalLM`, named as in a run's ``config.toml``.

    Args:
        architecture: its name, as in ``memspan train --model NAME``.
        model: the architecture's options; those left out have their defaults.
        embedding: those of embedding and head, see :class:`memspan.EmbeddingConfig`.
        vocab_size: number of token ids, V.
        segment_length: maximum number of tokens read at once; longer inputs are read in segments. A
            run's is its segment length in training.
        padding_id: an id outside of the vocabulary that is padding wherever it stands, whatever the
            attention mask says. transformers' ``pad_token_id`` would have to be in the vocabulary.
        options: those of every config of transformers. ``tie_word_embeddings=False`` unties embedding
            and head, whatever ``embedding`` says, as PEFT does when it merges what it trained of one.

    Raises:
        MemspanError: an unknown option, a wrong type or a value out of range.
    """

    model_type = "memspan"
    auto_map: ClassVar[dict[str, str]] = {}
    """No code comes with the weights; TRL asks every config of a class that transformers lacks."""
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache", "past_key_values"]

    def __init__(
        self,
        architecture: str = DEFAULT_ARCHITECTURE,
        model: dict[str, Any] | None = None,
        embedding: dict[str, Any] | None = None,
        vocab_size: int = 256,
        segment_length: int = 256,
        padding_id: int | None = None,
        **options: Any,
    ) -> None:
        self.architecture = architecture
        self.model = model or {}
        self.embedding = embedding or {}
        self.vocab_size = vocab_size
        self.segment_length = segment_length
        self.padding_id = padding_id
        # The model says which weights are tied; without this, transformers does not ask.
        if not options.setdefault("tie_word_embeddings", True):
            self.embedding = {**self.embedding, **UNTIED}
        backbone, embeddings = self.parts()
        self.model = dataclasses.asdict(cast(Any, backbone))
        self.embedding = dataclasses.asdict(embeddings)
        # Sizes under the names by which other libraries, such as PEFT, look for them.
        options["hidden_size"] = backbone.d_model
        options["num_hidden_layers"] = self.model["n_layers"]
        options["num_attention_heads"] = self.model.get("n_heads", 1)
        super().__init__(**options)

    def parts(self) -> tuple[BackboneConfig, EmbeddingConfig]:
        """The options of backbone and embedding, checked.

        Raises:
            MemspanError: an unknown option, a wrong type or a value out of range.
        """
        for name in ("vocab_size", "segment_length"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise MemspanError(f"{name} must be an integer of at least 1, not {value!r}")
        padding = self.padding_id
        if padding is not None and (type(padding) is not int or 0 <= padding < self.vocab_size):
            raise MemspanError(
                f"padding_id must be an integer outside of 0 .. {self.vocab_size - 1}, not {padding!r}"
            )
        if not isinstance(self.architecture, str) or self.architecture not in MODELS:
            raise MemspanError(
                f"there is no architecture {self.architecture!r}: use one of {', '.join(MODELS)}, or "
                "import the module that registers it first"
            )
        backbone = section(MODELS[self.architecture], "model", self.model)
        return backbone, section(EmbeddingConfig, "embedding", self.embedding)
