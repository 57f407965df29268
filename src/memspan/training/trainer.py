"""Training: truncated back-propagation through time, with the memory carried from step to step."""

from __future__ import annotations

import dataclasses
import lzma
import math
import re
import shlex
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from memspan.data.streams import Segment, evaluation_segments
from memspan.distributed.processes import ALONE, whole
from memspan.distributed.reports import report_stop
from memspan.errors import MemspanError, NonFiniteError
from memspan.evaluation import Scores, percent, score_tokens
from memspan.generation import draw_tokens, read_prompt
from memspan.models.output import Output
from memspan.nn import NOT_SCORED
from memspan.runs import checkpoints
from memspan.runs.claim import Claim
from memspan.sampling import Sampling
from memspan.training import metrics
from memspan.training.health import MOST_SKIPS_IN_A_ROW, Health, largest_gradients, place
from memspan.training.optimisation import learning_rate, set_learning_rate
from memspan.training.state import TrainingState
from memspan.training.terminal import progress, resume_command, stoppable

if TYPE_CHECKING:
    from memspan.runs.shared_saves import SharedSaves

LOG_EVERY = 10
"""Steps between training records in metrics.jsonl."""
STATISTICS_SEGMENTS = 32
"""Segments of validation text that fill memory before the last of them is looked into."""


class Trainer(TrainingState):
    """A run and its loop."""

    statistics: Mapping[str, Tensor] = {}
    """What the last segment read told, see :class:`~memspan.models.output.Output`."""
    skips_in_a_row = 0
    asked_to_stop = interrupted = False
    claim: Claim | None = None
    """The run's folder; of several processes the first has it."""
    saves: SharedSaves | None = None
    """What several processes save with, from the first save on."""
    moved_from: Path | None = None
    """Where the folder was when the run began, if it was moved since."""

    # --- the loop -------------------------------------------------------------------------------

    def fit(self) -> None:
        """Train to the last step, then score, sample and say what was written."""
        options = self.config.train
        self._introduce()
        log: metrics.Metrics | metrics.Unwritten = metrics.Unwritten()
        if self.processes.first:
            log = metrics.Metrics(self.folder, options.tracker, self.step)
        with stoppable(self._ask_to_stop), progress(self.console, options.steps) as show:
            show(completed=self.step)
            recent: list[Tensor] = []
            clock, seen = time.perf_counter(), 0
            while self.step < options.steps and not self._stopping():
                tokens_before = self._tokens_read()
                if (loss := self.update()) is not None:
                    recent.append(loss)
                seen += self._tokens_read() - tokens_before
                last = self.step == options.steps
                if self.step % LOG_EVERY == 0 or last:
                    # NaN: every update since the last record was skipped.
                    nats = torch.stack(recent).mean().item() if recent else math.nan
                    self._log_training(log, nats, seen / (time.perf_counter() - clock), show)
                    recent, clock, seen = [], time.perf_counter(), 0
                if last or (options.evaluate_every and self.step % options.evaluate_every == 0):
                    self._validate(log)
                    clock, seen = time.perf_counter(), 0
                due = options.save_every and self.step % options.save_every == 0
                if last or due or self.best_step == self.step:
                    self.save()
            if self.interrupted:
                self.save()
            if self.saves is not None:
                self.saves.finish()
                self.processes.wait()
        log.close()
        if self.interrupted:
            resume = f"continue with: {resume_command(self.folder)}"
            if self.moved_from is not None:
                raise MemspanError(
                    f"the run's folder {self.moved_from} was moved while it was trained: stopped at "
                    f"step {self.step:,} and saved where it is now; {resume}"
                )
            self.console.print(f"stopped at step {self.step:,}; {resume}")
            report_stop()
            return
        if self.claim is not None:
            self._follow(self.claim)
        if self.saves is not None and self.processes.first:
            checkpoints.export(self.folder)
        if self.processes.first or self.passes.sharded:
            self._conclude()

    def update(self) -> Tensor | None:
        """One update of the weights; the mean loss in nats per token, or None if it was skipped."""
        self.model.train()
        emptied = self.health.reset_memory_rows
        options = self.config.train
        self.streams.set_segment_length(options.segment_length_at(self.step))
        segments = [self.streams.next() for _ in range(options.segments_per_update(self.step))]
        # The update is the mean over all tokens that it scores. Every process sees all rows' targets.
        n_scored = sum(int((segment.targets != NOT_SCORED).sum()) for segment in segments)
        per_pass = max(n_scored, 1) / (len(segments) * self.processes.size)
        with self.precision.float32_products():
            read = self._accumulate_gradients(segments, per_pass)
        self.memory = self.health.clean(self.memory)
        own = self.health.reset_memory_rows - emptied
        self.health.reset_memory_rows = emptied + int(self.processes.total(own))
        loss = torch.stack([losses.sum() / per_pass for _, losses in read]).mean()
        loss = self.processes.mean(loss)
        groups = self.model.clip_groups()
        gradients = [[p.grad for p in group if p.grad is not None] for group in groups]
        norms = [whole(torch.nn.utils.get_total_norm(group)) for group in gradients]
        self.step += 1
        if not all(map(math.isfinite, (loss, *norms))):
            self._skip(read)
            return None
        self.skips_in_a_row = 0
        for group, norm in zip(groups, norms, strict=True):
            limit = self.config.optim.clip_norm or math.inf
            torch.nn.utils.clip_grads_with_norm_(group, limit, norm)
        set_learning_rate(self.optimizer, learning_rate(self.step - 1, self.config))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def _accumulate_gradients(
        self, segments: list[Segment], per_pass: float
    ) -> list[tuple[Segment, Tensor]]:
        """Read the segments of one update, forward and backward; each with its losses ``[B, T]``.

        ``per_pass``: scored tokens of one process in one segment, on average over the update.
        """
        pending = torch.zeros((), device=self.device)
        read: list[tuple[Segment, Tensor]] = []
        for n, segment in enumerate(segments, 1):
            last = n == len(segments)
            with self.passes.exchange(now=last):
                output = self._read(segment)
                assert output.losses is not None
                loss = output.losses.sum() / per_pass + output.auxiliary_loss
                pending = pending + loss / len(segments)
                self.memory, self.statistics = output.memory, output.statistics
                if n % self.config.train.gradient_segments == 0 or last:
                    pending.backward()
                    pending = torch.zeros((), device=self.device)
                    # The paper's stop-gradient: back-propagation ends at this segment's border.
                    self.memory = self.memory.detach()
            read.append((segment, output.losses.detach()))
        return read

    def _read(self, segment: Segment) -> Output:
        """This process's rows of a segment."""
        own = segment.part(self.rows, self.device)
        with self.precision.autocast(self.device):
            return self.passes(own.inputs, self.memory, own.targets, own.starts)

    def _skip(self, read: list[tuple[Segment, Tensor]]) -> None:
        """Leave the update out, or stop where that is what was asked, or no use any more."""
        self.health.skipped_updates += 1
        self.skips_in_a_row += 1
        if self.config.train.non_finite == "stop" or self.skips_in_a_row == MOST_SKIPS_IN_A_ROW:
            read = [(segment, self.processes.all_rows(losses)) for segment, losses in read]
            bad = [pair for pair in read if not pair[1].isfinite().all()]
            what = "loss" if bad else "gradient"
            if self.config.train.non_finite == "stop":
                more = ", or leave such updates out with --train.non-finite skip"
            else:
                more = f"; {self.skips_in_a_row} updates in a row were left out"
            raise MemspanError(
                f"the {what} is not finite at step {self.step} "
                f"({place(*(bad or read)[0])}; {largest_gradients(self.model)}): lower "
                f"--optim.learning-rate, or set --optim.clip-norm{more}; {self._kept()}"
            )
        self.optimizer.zero_grad(set_to_none=True)

    def _kept(self) -> str:
        steps = checkpoints.steps_of(self.folder)
        if not steps:
            return f"there was no checkpoint in {self.folder} yet"
        return f"the checkpoint of step {steps[-1]} is kept in {self.folder}"

    def save(self) -> None:
        """Write a checkpoint of all that the next step depends on.

        Raises:
            MemspanError: the disk is full, or the run's folder is lost.
        """
        # Without validations yet there is no best: the newest weights are published.
        best = self.best_step in (None, self.step)
        if self.claim is not None:
            self._follow(self.claim)
            for line in self.claim.restore():
                self.console.print(line)
        if self.mesh is not None:
            self.saves = self.saves or self._shared_saves()
            self.saves.begin(self.taken(), best)
        elif self.claim is not None:
            checkpoints.save(self.claim, self.taken(), best)
        else:
            raise MemspanError(
                f"this trainer does not hold the folder {self.folder}: set its claim, as "
                "memspan.train.train does"
            )

    def _follow(self, claim: Claim) -> None:
        """Where the run's folder was moved, go on there, to the end of this step."""
        if claim.moved():
            self.moved_from, self.asked_to_stop = self.folder, True
            claim.follow()
            self.folder = claim.folder

    def _shared_saves(self) -> SharedSaves:
        # Imported here: one process starts faster without what it needs.
        from memspan.runs.shared_saves import SharedSaves

        return SharedSaves(self.folder, self.claim, self.processes)

    # --- validation and reports -----------------------------------------------------------------

    def score(self, batch_size: int) -> Scores:
        """Score the validation split's first ``evaluate_tokens`` tokens, from an empty memory."""
        tokens, document_starts = self._validation()
        self.model.eval()
        batch_size = min(batch_size, len(tokens))
        return score_tokens(
            self.passes.scored,
            tokens,
            self.prepared.tokenizer,
            document_starts=document_starts,
            batch_size=batch_size,
            segment_length=min(self.config.train.segment_length, len(tokens)),
            precision=self.scoring_precision,
            processes=self.processes if batch_size % self.processes.size == 0 else ALONE,
        )

    def sample(self, n_tokens: int) -> str:
        """Text that the model writes after a line break, always with the same draws."""
        self.model.eval()
        reader = self.passes.scored.reader(batch_size=1, precision=self.scoring_precision)
        decoder = self.prepared.tokenizer.stream_decoder()
        logits = read_prompt(reader, [self.prepared.tokenizer.encode(b"\n")])
        draws = draw_tokens(reader, logits, n_tokens, Sampling(temperature=0.8, seed=1))
        return "".join(decoder.push(ids[0]) for ids in draws)

    def _validation(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Tokens and, where the run minds documents, their starts."""
        split = self.prepared.splits["validation"]
        tokens = split.tokens[: self.config.train.evaluate_tokens or None]
        starts = split.document_starts if self.config.data.document_reset else None
        return tokens, starts

    @torch.no_grad()
    def _validation_statistics(self) -> dict[str, float]:
        """What the architecture tells about a sample of the validation split, layer by layer."""
        if not self.statistics:
            return {}
        tokens, document_starts = self._validation()
        batch_size = min(self.config.train.batch_size, len(tokens))
        segment_length = min(self.config.train.segment_length, len(tokens))
        segments = evaluation_segments(tokens, batch_size, segment_length, document_starts)
        scored = self.passes.scored
        precision = self.scoring_precision
        reader = scored.reader(batch_size=batch_size, precision=precision)
        every_row = slice(0, batch_size)
        read = [s.part(every_row, self.device) for s in islice(segments, STATISTICS_SEGMENTS)]
        for segment in read[:-1]:
            reader.read(segment.inputs, starts=segment.starts)
        last = read[-1]
        with precision.applied(self.device):
            output = scored(last.inputs, reader.memory, starts=last.starts)
        return by_layer(output.statistics)

    def _validate(self, log: metrics.Metrics | metrics.Unwritten) -> None:
        # Many streams: faster than one, close enough to compare checkpoints.
        try:
            scores = self.score(self.config.train.batch_size)
        except NonFiniteError as error:
            self.console.print(f"step {self.step:>6,}  validation: {error}", highlight=False)
            return
        if scores.nats_per_token < self.best:
            self.best, self.best_step = scores.nats_per_token, self.step
        if not (self.processes.first or self.passes.sharded):
            return
        log.log(
            self.step,
            tokens=self._tokens_read(),
            validation_nats_per_token=scores.nats_per_token,
            validation_bits_per_byte=scores.bits_per_byte,
            **({"validation_unknown_share": scores.unknown_share} if scores.n_unknown else {}),
            **self._validation_statistics(),
        )
        nats = f"{scores.nats_per_token:.4f} nats per token"
        said = (
            f"{scores.bits_per_byte:.4f} bits per byte  ({nats})"
            if not scores.n_unknown
            else f"{nats} ({percent(scores.unknown_share)} unknown: no bits per byte)"
        )
        self.console.print(f"step {self.step:>6,}  validation {said}")
        if self.config.train.sample_tokens and self.step < self.config.train.steps:
            text = self.sample(min(self.config.train.sample_tokens, 80))
            self.console.print(f"  sample: {text!r}", markup=False, highlight=False)

    def _log_training(
        self,
        log: metrics.Metrics | metrics.Unwritten,
        nats: float,
        speed: float,
        show: Callable[..., None],
    ) -> None:
        text = self.prepared.splits["train"]
        bits = None
        if not self._unknown_in_training:
            bits = nats / math.log(2) * len(text.tokens) / text.n_bytes
        statistics = {name: self.processes.mean(x) for name, x in self.statistics.items()}
        losses = {"train_nats_per_token": nats, "train_bits_per_byte": bits}
        log.log(
            self.step,
            tokens=self._tokens_read(),
            **(losses if math.isfinite(nats) else {}),
            **dataclasses.asdict(self.health),
            learning_rate=self.optimizer.param_groups[0]["lr"],
            tokens_per_second=speed,
            **{f"train_{name}": value for name, value in by_layer(statistics).items()},
        )
        loss = f"{nats:.3f}" if bits is None else f"{nats:.3f}  {bits:.3f} bits/byte"
        show(completed=self.step, loss=loss, speed=speed)

    @cached_property
    def _unknown_in_training(self) -> float:
        """Share of the training tokens."""
        tokens = self.prepared.splits["train"].tokens
        return self.prepared.tokenizer.count_unknown(tokens) / len(tokens)

    def _introduce(self) -> None:
        text, count = self.prepared.splits["train"], sum(p.numel() for p in self.model.parameters())
        options = self.config.train
        passes = options.batch_size * options.tokens_read(options.steps) / len(text.tokens)
        kind = self.prepared.tokenizer.kind
        if self._unknown_in_training:
            kind += f", {percent(self._unknown_in_training)} unknown"
        self.console.print(
            f"{self.config.architecture}, {count:,} parameters, on {self.device} in "
            f"{self.precision}\n"
            f"corpus {self.config.data.corpus}: {len(text.tokens):,} training tokens "
            f"({kind}), read {passes:.2f} times in "
            f"{options.steps:,} steps\nrun folder {self.folder}",
            highlight=False,
        )
        for line in self.precision.notices(self.device, self.model.float32_part()):
            self.console.print(line, highlight=False)

    def _conclude(self) -> None:
        if self.health != Health():
            self.console.print(f"{self.health}", highlight=False)
        tokens, _ = self._validation()
        text = self.prepared.tokenizer.decode(tokens)
        scores = self.score(1)
        whole = len(tokens) == len(self.prepared.splits["validation"].tokens)
        part = "the validation split" if whole else "the validation split's first part"
        say = self.console.print
        how = "every document by itself" if self.config.data.document_reset else "memory carried"
        say(f"\nfinal score on {part}, {scores.tokens:,} tokens in one stream, {how}:")
        perplexity = f"perplexity per token {scores.perplexity:.2f}"
        if scores.bits_per_byte is None:
            say(f"  {self.config.architecture:<16} {perplexity}")
            say(
                f"{percent(scores.unknown_share)} of the tokens are unknown and their text is not "
                "scored: there are no bits per byte, and the model cannot be compared with lzma, a "
                "compressor."
            )
        else:
            baseline = 8 * len(lzma.compress(text, preset=9)) / len(text)
            bits = f"{scores.bits_per_byte:.3f} bits per byte"
            say(f"  {self.config.architecture:<16} {bits}   ({perplexity})")
            say(f"  {'lzma':<16} {baseline:.3f} bits per byte   (the same text)")
            say(
                "Lower is better: the model predicts this text better than a strong compressor does."
                if scores.bits_per_byte < baseline
                else "Lower is better. After minutes of training it is normal not to reach lzma, a "
                "strong compressor, yet: more --train.steps and a larger model do."
            )
        if self.config.train.sample_tokens:
            sample = self.sample(self.config.train.sample_tokens)
            say("\nsample:", style="bold")
            say(sample, markup=False, highlight=False)
        pictures = metrics.plot(self.folder, self.config.model.plots)
        say("\nwritten:", style="bold")
        say(f"  run folder  {self.folder}\n  metrics     {self.folder / 'metrics.jsonl'}")
        for picture in pictures:
            say(f"  picture     {picture}")
        if not pictures:
            say("  no picture: pip install 'memspan[plot]' for loss.png")
        folder = shlex.quote(str(self.folder))
        say("\nnext:", style="bold")
        # Commands are copied: no line breaks or colours inside.
        for command in (f"evaluate {folder}", f"generate {folder} {prompt_from(text)}".rstrip()):
            say(f"  memspan {command}", highlight=False)

    def _ask_to_stop(self) -> None:
        self.asked_to_stop = True

    def _stopping(self) -> bool:
        """Whether to stop before the next update: all processes do, or none."""
        moved = self.claim is not None and self.claim.moved()
        self.interrupted = self.processes.any(self.asked_to_stop or moved)
        return self.interrupted

    def _tokens_read(self) -> int:
        return self.config.train.batch_size * self.streams.tokens_read


def prompt_from(text: bytes) -> str:
    """A ``--prompt`` in the manner of ``text``: its first words, none where it has no plain ones."""
    for line in text[:4096].decode(errors="replace").splitlines():
        words = re.match(r"\w[\w ,.:;'()-]{2,23}(?!\w)", line.strip())
        if words and "\N{REPLACEMENT CHARACTER}" not in words[0]:
            return f"--prompt {shlex.quote(words[0].strip())}"
    return ""


def by_layer(statistics: Mapping[str, Tensor]) -> dict[str, float]:
    """``{"loss": [L]}`` as ``{"loss/layer_1": ..., ...}``."""
    return {
        f"{name}/layer_{n}": value
        for name, values in statistics.items()
        for n, value in enumerate(values.tolist(), 1)
    }
