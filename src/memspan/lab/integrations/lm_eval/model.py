"""A run as a model of the evaluation harness: its requests, answered by reading with memory."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lm_eval.models  # noqa: F401  (registers the harness's own, which it does only as the first)
import numpy as np
import torch
import torch.nn.functional as F
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from memspan.devices import device_for
from memspan.errors import MemspanError, NonFiniteError
from memspan.lab.data.streams import START
from memspan.lab.data.tokenizers.base import bytes_of
from memspan.lab.generation.writer import generate
from memspan.lab.runs.run import Run, load, options_of, precision_for, segment_for
from memspan.lab.sampling import Sampling
from memspan.memory import Memory
from memspan.models import Reader
from memspan.nn import NOT_SCORED


@register_model("memspan")
class MemspanLM(LM):
    """A run, which reads each document or context from an empty memory to its end.

    Nothing is truncated or cut into windows: memory carries what was read. A context that several
    requests share is read once, and each continuation starts from its memory.

    Args:
        run: the run, its folder, or the name of one that comes with memspan.
        batch_size: texts that are read side by side; scores stay the same up to rounding.
        device: where the model goes (None: CUDA if available; a :class:`memspan.Run` stays).
        segment_length: tokens per step, T (None: as in training).
        max_batch_size: given by the harness to every model; has no effect.
        options: the architecture's own, such as ``memory_length=1024`` (left out: as in training).

    Raises:
        MemspanError: there is no such run, device or option.

    Example::

        model = MemspanLM("runs/book", memory_length=512)
        lm_eval.simple_evaluate(model, tasks=["wikitext"])
    """

    def __init__(
        self,
        run: Run | str | Path = "",
        batch_size: int | str | None = None,
        device: str | None = None,
        segment_length: int | None = None,
        max_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if run == "":
            raise MemspanError("say which run to evaluate: run=FOLDER among the model's arguments")
        self._rows = _at_least_1("batch_size", 1 if batch_size is None else batch_size)
        # The harness's command line says cuda:0 wherever it runs.
        if device is None or (device == "cuda:0" and not torch.cuda.is_available()):
            device = "auto"
        self.run = run if isinstance(run, Run) else load(run, str(device_for(device)))
        self._options = options
        self._sizes, self._reading = options_of(self.run, options)
        if segment_length is None:
            segment_length = segment_for(self.run, None, self._sizes, self._reading)
        self._segment_length = _at_least_1("segment_length", segment_length)
        self._precision = precision_for(self.run)
        self._altered = False
        # An option that the model cannot have is refused here, and not in the middle of a task.
        self._reader()

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-probability of each whole document ``(text,)``, in nats: the sum over its tokens,
        each scored once with all that the memory holds, as by :func:`memspan.evaluate`."""
        texts = [self._encode(request.args[0]) for request in requests]
        self._report_unknown(texts)
        found = [0.0] * len(texts)
        with tqdm(total=len(texts), desc="documents", disable=disable_tqdm) as bar:
            for n, score, _ in self._scores(np.array([START]), texts, with_greedy=False):
                found[n] = score
                self.cache_hook.add_partial("loglikelihood_rolling", requests[n].args, score)
                bar.update()
        return found

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """The log-probability of each continuation of ``(context, continuation)``, in nats, and whether
        greedy generation would write it.

        An empty context is a line break, as in :func:`memspan.generate`.

        Raises:
            MemspanError: a continuation is empty.
        """
        pairs = [self._pair(*request.args) for request in requests]
        self._report_unknown(scored for _, scored in pairs)
        sharing: dict[bytes, list[int]] = {}
        for n, (context, _) in enumerate(pairs):
            sharing.setdefault(context.tobytes(), []).append(n)
        found = [(0.0, False)] * len(pairs)
        with tqdm(total=len(pairs), desc="continuations", disable=disable_tqdm) as bar:
            for among in sharing.values():
                context = pairs[among[0]][0]
                texts = [pairs[n][1] for n in among]
                for i, score, greedy in self._scores(context, texts, with_greedy=True):
                    found[among[i]] = (score, greedy)
                    bar.update()
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each context of ``(context, options)``, up to a text of ``until``.

        An empty context is a line break, as in :func:`memspan.generate`.

        Raises:
            MemspanError: an option of generation is not known here.
        """
        texts = []
        for request in tqdm(requests, desc="texts", disable=disable_tqdm):
            context, options = request.args
            given: dict[str, Any] = {**normalize_gen_kwargs(options)}
            # A task may say null, or an empty text, for no end.
            until = list(filter(None, given.pop("until")))
            n_tokens = given.pop("max_gen_toks")
            written = generate(
                self.run,
                context,
                tokens=_at_least_1("max_gen_toks", n_tokens),
                sampling=_sampling(given),
                stop=until,
                precision=self._precision,
                **self._options,
            )
            texts.append(written.text)
        return texts

    def _encode(self, text: str) -> np.ndarray:
        ids = self.run.tokenizer.encode(bytes_of(text))
        self._altered = self._altered or self.run.tokenizer.alters(bytes_of(text), ids)
        return ids

    def _pair(self, context: str, continuation: str) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of a context, at least one, and those of what follows.

        They are cut from those of the whole text: a token that begins in the context and ends in the
        continuation belongs to the latter.
        """
        tokenizer = self.run.tokenizer
        whole = self._encode(context + continuation)
        before = self._encode(context)
        n = min(len(whole), len(before))
        same = whole[:n] == before[:n]
        n = n if same.all() else int(same.argmin())
        if n and n == len(before) and before[-1] == tokenizer.unknown:
            # Unknown before and after: does it go on, as the first half of a word does?
            n -= len(whole) < len(before) + len(self._encode(continuation))
        if n == len(whole):
            raise MemspanError(
                f"there is nothing to score after {context[-60:]!r}: give the task's choices and "
                "targets some text"
            )
        return (whole[:n] if n else self._encode_opening()), whole[n:]

    def _encode_opening(self) -> np.ndarray:
        """The tokens that stand for an empty context."""
        ids = self.run.tokenizer.encode(self.run.tokenizer.opening)
        return ids if len(ids) else np.array([START])

    def _report_unknown(self, texts: Iterable[np.ndarray]) -> None:
        """Warn of scores that flatter the model: the harness cannot leave out unknown words."""
        if self._altered:
            logging.getLogger("memspan").warning(
                f"the tokeniser of {self.run.folder} does not restore these texts (their case, spaces "
                "or rare characters are lost), so bits per byte and perplexity per word flatter this "
                "model compared with others"
            )
        scored = np.concatenate([np.empty(0, self.run.tokenizer.dtype), *texts])
        if n_unknown := self.run.tokenizer.count_unknown(scored):
            logging.getLogger("memspan").warning(
                f"{n_unknown:,} of {len(scored):,} scored tokens are unknown to the vocabulary of "
                f"{self.run.folder}: their text is not scored, so bits per byte and perplexity per "
                "word flatter this model compared with others"
            )

    def _reader(self, memory: Memory | None = None) -> Reader:
        memory = self.run.model.initial_memory(1, **self._sizes) if memory is None else memory
        return self.run.model.reader(memory, precision=self._precision, **self._reading)

    def _scores(
        self, before: np.ndarray, texts: Sequence[np.ndarray], *, with_greedy: bool
    ) -> Iterator[tuple[int, float, bool]]:
        """Index, log-probability and, if wanted, greediness of texts that each follow ``before``."""
        reader = self._reader()
        for segment in _row(before[:-1]).split(self._segment_length, 1):
            reader.read(segment.to(reader.device))
        # Longest first: texts of a batch have similar lengths.
        order = sorted(range(len(texts)), key=lambda n: -len(texts[n]))
        for start in range(0, len(order), self._rows):
            batch = order[start : start + self._rows]
            targets = pad_sequence(
                [_row(texts[n])[0] for n in batch], batch_first=True, padding_value=NOT_SCORED
            )
            inputs = F.pad(targets.clamp(min=0), (1, 0), value=int(before[-1]))[:, :-1]
            branch = self._reader(reader.memory.select([0] * len(batch)))
            scores, greedy = self._read(branch, inputs, targets, with_greedy)
            yield from zip(batch, scores, greedy, strict=True)

    def _read(
        self, reader: Reader, inputs: Tensor, targets: Tensor, with_greedy: bool
    ) -> tuple[list[float], list[bool]]:
        """Each row's log-probability of its targets ``[B, T]``, and whether all are the likeliest."""
        scores = torch.zeros(len(targets), dtype=torch.float64)
        greedy = torch.full((len(targets),), with_greedy)
        size = self._segment_length
        for tokens, wanted in zip(inputs.split(size, 1), targets.split(size, 1), strict=True):
            tokens = tokens.to(reader.device)
            wanted = wanted.to(reader.device)
            if with_greedy:
                logits = reader.read(tokens)
                losses = F.cross_entropy(
                    logits.transpose(1, 2).float(),
                    wanted,
                    ignore_index=NOT_SCORED,
                    reduction="none",
                )
                likeliest = (logits.argmax(2) == wanted) | (wanted == NOT_SCORED)
                greedy &= likeliest.all(1).cpu()
            else:
                losses = reader.read(tokens, targets=wanted)
            # Not every device has float64.
            scores -= losses.cpu().double().sum(1)
        if not scores.isfinite().all():
            raise NonFiniteError(
                "a score is not finite: the weights or the memory have overflowed; use an earlier "
                "checkpoint"
            )
        return scores.tolist(), greedy.tolist()


def _sampling(options: dict[str, Any]) -> Sampling:
    """The options of sampling by the harness's: greedily unless ``do_sample``.

    The draws follow torch's seed, which the harness sets.

    Raises:
        MemspanError: an option is not known here.
    """
    names = ("temperature", "top_k", "top_p", "min_p")
    if unknown := set(options) - {*names, "do_sample"}:
        raise MemspanError(
            f"{', '.join(sorted(unknown))} is not an option of generation here: use until, "
            f"max_gen_toks, do_sample, {', '.join(names)}"
        )
    if not options.pop("do_sample"):
        return Sampling(temperature=0.0)
    # 1 is the harness's default if a task does not set a temperature.
    seed = int(torch.randint(2**31, ()))
    return Sampling(**{"temperature": 1.0, **options}, seed=seed)


def _row(ids: np.ndarray) -> Tensor:
    """int64 ``[1, T]``."""
    return torch.from_numpy(ids.astype(np.int64))[None]


def _at_least_1(name: str, value: int | str) -> int:
    """An integer of at least 1, perhaps given as text."""
    if not str(value).isdecimal() or int(value) < 1:
        raise MemspanError(f"{name} must be a number, at least 1, not {value!r}")
    return int(value)
