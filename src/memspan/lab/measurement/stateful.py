"""Other models to measure: any language model that carries state."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from memspan.devices import device_for
from memspan.errors import MemspanError
from memspan.lab.data.corpora import ALL
from memspan.lab.data.prepared import prepare
from memspan.lab.data.streams import Segment
from memspan.lab.data.tokenizers.base import Tokenizer
from memspan.lab.data.tokenizers.plain import ByteTokenizer
from memspan.lab.data.tokenizers.pretrained import FILES, PretrainedTokenizer
from memspan.lab.data.tokenizers.registry import read_tokenizer
from memspan.lab.measurement.subject import Cuts, Subject, finite
from memspan.lab.runs.folder import run_folder
from memspan.lab.runs.texts import check_field, split_of
from memspan.lab.targets import as_stateful, move, named
from memspan.nn import NOT_SCORED
from statelaws import RefusedError, Stateful
from statelaws.effect import without_effect
from statelaws.reading import called, device_of
from statelaws.states import tensors_of

SEGMENT = 256
"""Tokens that are read at once: a model whose outputs depend on cuts is measured with these."""
MOST_SCORES = 1 << 26
"""Maximum number of logits at once."""


@dataclass(frozen=True, kw_only=True)
class StatefulSubject(Subject):
    """Any language model that carries state."""

    model: Stateful[Any]
    """The model, in evaluation mode."""
    prefix: tuple[int, ...] = ()
    """Ids that its tokeniser puts before every text, which do not count as history."""

    @torch.no_grad()
    def losses(self, segment: Segment, cuts: Cuts, last: int) -> np.ndarray:
        assert self.model.inputs.vocab_size is not None
        rows = max(1, MOST_SCORES // (self.segment_length * self.model.inputs.vocab_size))
        parts = zip(segment.inputs.split(rows), segment.targets.split(rows), strict=True)
        return finite(torch.cat([self._seen(*part, cuts, last) for part in parts]))

    def _seen(self, inputs: Tensor, targets: Tensor, cuts: Cuts, last: int) -> Tensor:
        """Nats ``[B, last]``, each from at most a window's tokens."""
        n = inputs.shape[1]
        width = n if self.window is None else max(1, self.window - len(self.prefix))
        if n <= width:
            return self._nats(inputs, targets, cuts, last)
        # A window for each target would be exact; neighbours that share one miss at most an eighth of
        # it. A power of two, so that all histories have the same neighbours.
        step = 1 << (max(1, width // 8).bit_length() - 1)
        found = []
        for start in range(n - last, n, step):
            end = min(start + step, n)
            part = slice(max(0, end - width), end)
            own = self.cuts(end - part.start, 0)
            found.append(self._nats(inputs[:, part], targets[:, part], own, end - start))
        return torch.cat(found, 1)

    def _nats(self, inputs: Tensor, targets: Tensor, cuts: Cuts, last: int) -> Tensor:
        """Nats ``[B, last]``, read from an empty state."""
        n = inputs.shape[1]
        before = len(self.prefix)
        prefix = inputs.new_tensor(self.prefix).expand(len(inputs), -1)
        device = device_of(self.model)
        inputs = torch.cat([prefix, inputs], 1).to(device)
        state = self.model.start(len(inputs))
        found = []
        for start, end in cuts:
            # The prefix is read with the first part of the text.
            part = inputs[:, start + before if start else 0 : end + before]
            scores, state = self._read(part, state)
            first = max(start, n - last)
            if first < end:
                wanted = targets[:, first:end].to(device)
                precise = torch.promote_types(scores.dtype, torch.float32)
                scores = scores[:, first - end :].flatten(0, 1).to(precise)
                nats = nn.functional.cross_entropy(
                    scores, wanted.flatten(), ignore_index=NOT_SCORED, reduction="none"
                )
                found.append(nats.view(wanted.shape))
        return torch.cat(found, 1)

    def _read(self, inputs: Tensor, state: Any) -> tuple[Tensor, Any]:
        try:
            scores, state = called(self.model.read, inputs, state)
        except RefusedError as error:
            raise MemspanError(f"the model refuses to read: {error}") from error
        except Exception as error:
            # Any exception here is the model's error.
            raise MemspanError(f"the model stopped with {type(error).__name__}: {error}") from error
        size = self.model.inputs.vocab_size
        if scores.shape[:2] != inputs.shape or scores.dim() != 3 or scores.shape[2] < (size or 0):
            raise MemspanError(
                f"the model returns {list(scores.shape)} for tokens {list(inputs.shape)}, where logits "
                f"are [B, T, {size}]: give one with a language model's head"
            )
        return scores, state

    @torch.no_grad()
    def state_bytes(self, n_tokens: int) -> int:
        n = min(n_tokens, self.window or n_tokens)
        tokens = torch.from_numpy(self.tokens[None, :n].astype(np.int64))
        state = self.model.start(1)
        for start, end in self.cuts(n, 0):
            _, state = self._read(tokens[:, start:end].to(device_of(self.model)), state)
        return sum(tensor.nbytes for tensor in tensors_of(state))


def subject_of(
    target: object,
    corpus: str,
    field: str | None,
    split: str,
    tokenizer: str | None,
    trust_remote_code: bool,
    device: str,
    progress: bool,
    name: str,
) -> tuple[StatefulSubject, list[str]]:
    """Prepare a model other than a run and a text; also returns remarks on what is left out."""
    if isinstance(target, str | Path):
        model = named(str(target), trust_remote_code, vocab_size=256)
    else:
        model = as_stateful(target)
    vocab_size = model.inputs.vocab_size
    if vocab_size is None:
        raise MemspanError(f"{name} reads vectors, and a text is tokens: give a language model")
    check_field(corpus, field)
    own = tokenizer_for(name, vocab_size, tokenizer, trust_remote_code)
    prepared = prepare(
        corpus,
        own.kind,
        field=field or "text",
        with_tokenizer=own,
        progress=progress,
        whole=split == ALL,
    )
    for line in prepared.notices():
        logging.getLogger("memspan").warning(line)
    tokens, starts, _ = split_of(prepared, corpus, split)
    if tokens.max(initial=0) >= vocab_size:
        # Not by the vocabulary's size: a tokeniser may have more special tokens than the model.
        raise MemspanError(
            f"{name} has {vocab_size:,} tokens, and this tokeniser's ids go beyond them: give the "
            "one that the model was trained with (--tokenizer)"
        )
    left_out = []
    if len(starts) > 1:
        left_out.append("where documents begin: they are read as one text")
    move(model, device_for(device))
    model.module.eval()
    if no_effect := without_effect(model):
        if not no_effect.stateless:
            raise MemspanError(f"{name} cannot be measured: {no_effect}")
        left_out.append(f"history before a segment of {SEGMENT} tokens: {no_effect}")
    subject = StatefulSubject(
        model=model,
        tokenizer=own,
        tokens=tokens,
        segment_length=SEGMENT,
        window=window_of(model.module),
        prefix=own.prefix if isinstance(own, PretrainedTokenizer) else (),
    )
    return subject, left_out


def window_of(module: nn.Module) -> int | None:
    """Tokens that a model of transformers was made for: its table of positions, or as many as its
    rotations were trained with (None: any)."""
    config: Any = getattr(module, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    # Also the name by which GPT-2's n_positions is known.
    window = getattr(config, "max_position_embeddings", None)
    return window if isinstance(window, int) and window > 0 else None


def tokenizer_for(
    target: str, vocab_size: int, given: str | None, trust_remote_code: bool
) -> Tokenizer:
    """The tokeniser of the model ``target``, which is not a run.

    ``given``: ``bytes``, a ``tokenizer.json``, or a folder in transformers' format (None: the one in
    the model's own folder, or bytes).
    """
    folder = run_folder(target) if given is None else Path(given)
    has_one = any((folder / name).is_file() for name in FILES)
    if given is None and not has_one and not 256 <= vocab_size < 512:
        # Some have a few special tokens more than bytes; many more mean another tokeniser.
        raise MemspanError(
            f"{target} has {vocab_size:,} tokens and no tokeniser, and bytes are 256: give its "
            "tokeniser (--tokenizer FOLDER, or a tokenizer.json)"
        )
    if given == "bytes" or (given is None and not has_one):
        return ByteTokenizer()
    return (
        PretrainedTokenizer(folder, trust_remote_code)
        if folder.is_dir()
        else read_tokenizer(folder)
    )
