"""Training: truncated back-propagation through time, with the memory carried from step to step."""

from __future__ import annotations

import dataclasses
import hashlib
import lzma
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from memspan import checkpoint, metrics, runs
from memspan.checkpoint import Checkpoint
from memspan.config import OptimConfig, RunConfig
from memspan.data.prepared import Prepared, prepare
from memspan.data.streams import Segment, Streams, evaluation_segments
from memspan.data.tokenizers import load_tokenizer
from memspan.distributed.passes import passes
from memspan.distributed.processes import (
    ALONE,
    Processes,
    local,
    own_device,
    placed,
    sharded,
    whole,
)
from memspan.errors import MemspanError, NonFiniteError
from memspan.evaluate import Scores, evaluate
from memspan.generate import Sampling, generate, read_prompt
from memspan.health import MOST_SKIPS_IN_A_ROW, Health, largest_gradients, place
from memspan.memory import Memory
from memspan.models import LanguageModel
from memspan.models.output import Output
from memspan.warm_start import initialise_from

if TYPE_CHECKING:
    from memspan.shared_saves import SharedSaves

LOG_EVERY = 10
"""Steps between training records in metrics.jsonl."""
STATISTICS_SEGMENTS = 32
"""Segments of validation text that fill memory before the last of them is looked into."""


def train(
    config: RunConfig[Any],
    folder: Path,
    console: Console,
    init_from: Path | None = None,
    processes: Processes = ALONE,
) -> None:
    """Start a new run in ``folder``, with the weights of the run ``init_from`` where they fit.

    All ``processes`` call this, with the same arguments but for the console.

    Raises:
        MemspanError: an unusable option, a folder in use, a loss that is not finite, a full disk.
    """
    device = own_device(device_for(config.train.device))
    prepared = processes.in_turn(
        lambda: prepare(config.data.corpus, config.data.tokenizer, config.data.vocab_size)
    )
    start = None if init_from is None else runs.load(init_from, str(device))
    config = _with_position_table(config)
    trainer = Trainer(config, folder, prepared, device, console, processes, start)
    with _claimed(folder, processes):
        if processes.first:
            checkpoint.create(folder, config, prepared.tokenizer)
        trainer.fit()


def resume(folder: Path, console: Console, processes: Processes = ALONE) -> None:
    """Continue a run exactly where its last checkpoint left it.

    Raises:
        MemspanError: no run, a damaged, changed or finished one, or one that another process trains.
    """
    config = runs.load_config(folder)
    with _claimed(folder, processes):
        _resume(folder, config, console, processes)


def _resume(folder: Path, config: RunConfig[Any], console: Console, processes: Processes) -> None:
    device = own_device(device_for(config.train.device))
    # A single process looks at all of the checkpoint before the model takes memory.
    saved = checkpoint.latest(folder) if processes.size == 1 else None
    state = checkpoint.latest_state(folder) if saved is None else saved.state
    if processes.first:
        checkpoint.recover(folder, state)
    tokenizer = load_tokenizer(folder)
    prepared = processes.in_turn(
        lambda: prepare(
            config.data.corpus,
            config.data.tokenizer,
            config.data.vocab_size,
            with_tokenizer=tokenizer,
        )
    )
    if state["corpus"] != _identity(prepared):
        raise MemspanError(
            f"the corpus {config.data.corpus} is not what this run was trained on: restore its "
            "files (for python-stdlib: the same Python version), or start a new run"
        )
    if saved is not None:
        runs.check_fit(folder, config, tokenizer.vocab_size, saved.weights)
    trainer = Trainer(config, folder, prepared, device, console, processes)
    if saved is None:
        saved = processes.in_turn(
            lambda: checkpoint.latest(folder, trainer.target, verify=processes.first)
        )
        runs.check_fit(folder, config, tokenizer.vocab_size, saved.weights)
    if state["step"] >= config.train.steps:
        raise MemspanError(
            f"{folder} is finished: all its {config.train.steps} steps are made; start a new run "
            "for more"
        )
    trainer.restore(saved)
    console.print(f"resuming {folder} at step {trainer.step:,}")
    if not metrics.unchanged(folder, saved.state["metrics"]):
        console.print(
            f"{folder / 'metrics.jsonl'} is not as it was saved: records up to step "
            f"{trainer.step:,} may be wrong or missing; the training does not depend on them"
        )
    trainer.fit()


def _claimed(folder: Path, processes: Processes) -> AbstractContextManager[None]:
    return checkpoint.claim(folder) if processes.first else nullcontext()


class Trainer:
    """The state of a run and its loop."""

    def __init__(
        self,
        config: RunConfig[Any],
        folder: Path,
        prepared: Prepared,
        device: torch.device,
        console: Console,
        processes: Processes = ALONE,
        start: runs.Run | None = None,
    ) -> None:
        """``start``: a run whose weights are taken where they fit."""
        options = config.train
        self.processes, self.rows = processes, processes.rows(options.batch_size)
        if processes.size > 1 and getattr(config.model, "favor_redraw", False):
            raise MemspanError(
                "favor_redraw draws new features in every pass, others in each process: use one "
                "process, or drop it"
            )
        self.config, self.folder, self.prepared = config, folder, prepared
        self.device, self.console = device, console
        torch.manual_seed(options.seed)
        text = prepared.splits["train"]
        # First: refuses more rows than the text has before their memory is made.
        self.streams = Streams(
            text.tokens,
            options.batch_size,
            options.segment_length,
            text.document_starts if config.data.document_reset else None,
        )
        self.model = LanguageModel(
            prepared.tokenizer.vocab_size, config.model, config.embedding
        ).to(device)
        if start is not None:
            console.print(initialise_from(self.model, prepared.tokenizer, start).summary())
        self.memory: Memory = self.model.initial_memory(self.rows.stop - self.rows.start)
        self.mesh = processes.mesh(device) if processes.size > 1 else None
        self.passes = passes(self.model, options.parallel, self.mesh)
        self.optimizer = _optimizer(self.model, config.optim)
        self.bytes_per_token = text.n_bytes / len(text.tokens)
        self.statistics: dict[str, Tensor] = {}
        self.health, self.skips_in_a_row = Health(), 0
        self.step, self.best = 0, math.inf
        self.best_step: int | None = None
        self.asked_to_stop = self.interrupted = False
        self._own_draws()

    # --- the loop -------------------------------------------------------------------------------

    def fit(self) -> None:
        """Train to the last step, then score, sample and say what was written."""
        options = self.config.train
        self._introduce()
        log: metrics.Metrics | metrics.Unwritten = metrics.Unwritten()
        if self.processes.first:
            log = metrics.Metrics(self.folder, options.tracker, self.step)
        self.saves = self._shared_saves() if self.mesh else None
        with self._stoppable(), self._progress() as show:
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
            self.console.print(
                f"stopped at step {self.step:,}; continue with: memspan train --resume {self.folder}"
            )
            return
        if self.saves is not None and self.processes.first:
            checkpoint.export(self.folder)
        if self.processes.first or self.passes.sharded:
            self._conclude()

    def update(self) -> Tensor | None:
        """One update of the weights; the mean loss in nats per token, or None if it was skipped."""
        self.model.train()
        emptied = self.health.reset_memory_rows
        read = self._accumulate_gradients()
        self.memory = self.health.clean(self.memory)
        own = self.health.reset_memory_rows - emptied
        self.health.reset_memory_rows = emptied + int(self.processes.total(own))
        loss = torch.stack([losses.mean() for _, losses in read]).mean()
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
        for settings in self.optimizer.param_groups:
            settings["lr"] = learning_rate(self.step - 1, self.config)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def _accumulate_gradients(self) -> list[tuple[Segment, Tensor]]:
        """Read the segments of one update, forward and backward; each with its losses ``[B, T]``."""
        options = self.config.train
        segments = options.segments_per_update(self.step)
        self.streams.set_segment_length(options.segment_length_at(self.step))
        pending = torch.zeros((), device=self.device)
        read: list[tuple[Segment, Tensor]] = []
        for n in range(1, segments + 1):
            segment = self.streams.next()
            if segment.reset is not None:
                self.memory = self.memory.reset(segment.reset[self.rows].to(self.device))
            with self.passes.exchange(now=n == segments):
                output = self._read(segment)
                assert output.losses is not None
                pending = pending + (output.losses.mean() + output.auxiliary_loss) / segments
                self.memory, self.statistics = output.memory, output.statistics
                if n % options.gradient_segments == 0 or n == segments:
                    pending.backward()
                    pending = torch.zeros((), device=self.device)
                    # The paper's stop-gradient: back-propagation ends at this segment's border.
                    self.memory = self.memory.detach()
            read.append((segment, output.losses.detach()))
        return read

    def _read(self, segment: Segment) -> Output:
        """This process's rows of a segment."""
        with self._precision():
            return self.passes(
                segment.inputs[self.rows].to(self.device),
                self.memory,
                segment.targets[self.rows].to(self.device),
            )

    def _skip(self, read: list[tuple[Segment, Tensor]]) -> None:
        """Leave the update out, or stop where that is what was asked, or no use any more."""
        self.health.skipped_updates += 1
        self.skips_in_a_row += 1
        if self.config.train.non_finite == "stop" or self.skips_in_a_row == MOST_SKIPS_IN_A_ROW:
            read = [(segment, self.processes.all_rows(losses)) for segment, losses in read]
            first_bad = [pair for pair in read if not pair[1].isfinite().all()] or read
            if self.config.train.non_finite == "stop":
                more = ", or leave such updates out with --train.non-finite skip"
            else:
                more = f"; {self.skips_in_a_row} updates in a row were left out"
            raise MemspanError(
                f"the loss or its gradient is not finite at step {self.step} "
                f"({place(*first_bad[0])}; {largest_gradients(self.model)}): lower "
                f"--optim.learning-rate, or set --optim.clip-norm{more}; {self._kept()}"
            )
        self.optimizer.zero_grad(set_to_none=True)

    def _kept(self) -> str:
        steps = checkpoint.steps_of(self.folder)
        if not steps:
            return f"there was no checkpoint in {self.folder} yet"
        return f"the checkpoint of step {steps[-1]} is kept in {self.folder}"

    # --- saving and restoring -------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint of all that the next step depends on."""
        # Without validations yet there is no best: the newest weights are published.
        best = self.best_step in (None, self.step)
        training = {f"memory/{name}": self._shared(t) for name, t in self.memory.tensors().items()}
        names = {id(p): name for name, p in self.model.named_parameters()}
        for parameter, values in self.optimizer.state.items():
            for key, value in values.items():
                training[f"optimizer/{names[id(parameter)]}/{key}"] = value
        training["random/cpu"] = self._shared_draws(torch.get_rng_state())
        if self.device.type == "cuda":
            training["random/cuda"] = self._shared_draws(torch.cuda.get_rng_state(self.device))
        state = {
            "step": self.step,
            "best": None if math.isinf(self.best) else self.best,
            "best_step": self.best_step,
            "streams": self.streams.state_dict(),
            "corpus": _identity(self.prepared),
            "record": self.prepared.record,
            "metrics": metrics.checksum(self.folder),
            "health": dataclasses.asdict(self.health),
        }
        weights = runs.weights_of(self.model)
        saved = Checkpoint(weights, training, state)
        if self.saves is None:
            checkpoint.save(self.folder, saved, best)
        else:
            self.saves.begin(saved, best)

    def _shared_saves(self) -> SharedSaves:
        # Imported here: one process starts faster without what it needs.
        from memspan.shared_saves import SharedSaves

        return SharedSaves(self.folder, self.processes)

    def _shared(self, rows: Tensor) -> Tensor:
        """This process's rows as its part of those of all; a copy, for fields may be one tensor."""
        return rows if self.mesh is None else sharded(rows.clone(), self.mesh)

    def _shared_draws(self, state: Tensor) -> Tensor:
        """A state of a random generator, in a row of its own where there are several processes."""
        if self.mesh is None:
            return state
        return sharded(state[None], self.processes.mesh(state.device))

    def target(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """What a tensor of a checkpoint is read into: all of it, or this process's part."""
        whole_tensor = torch.empty(shape, dtype=dtype)
        if self.mesh is None:
            return whole_tensor
        kind, _, path = name.partition("/")
        if kind == "memory":
            rows = self.processes.rows(shape[0])
            return self._shared(whole_tensor[rows].to(self.device))
        like = self._layout().get(path if kind == "model" else path.rpartition("/")[0])
        if like is None or like.shape != shape:
            return whole_tensor
        return torch.empty_like(like, dtype=dtype)

    def _layout(self) -> dict[str, Tensor]:
        """Parameters and buffers by name: those that processes share say how."""
        return dict(self.model.state_dict(keep_vars=True))

    def _own_draws(self) -> None:
        """Random numbers of this process's own; the first one draws on as a single process does."""
        if self.processes.rank:
            seed = f"{self.config.train.seed} {self.step} {self.processes.rank}"
            torch.manual_seed(int(hashlib.sha256(seed.encode()).hexdigest()[:15], 16))

    def restore(self, saved: Checkpoint) -> None:
        """The inverse of :meth:`save`."""
        try:
            self._restore(saved)
        except (LookupError, RuntimeError, TypeError) as error:
            raise MemspanError(
                f"the newest checkpoint in {self.folder} does not fit its config.toml ({error}): "
                "restore both"
            ) from None

    def _restore(self, saved: Checkpoint) -> None:
        layout = self._layout()
        weights = {name: placed(tensor, layout.get(name)) for name, tensor in saved.weights.items()}
        runs.load_weights(self.model, weights, self.folder)
        groups: dict[str, dict[str, Tensor]] = {}
        for name, tensor in saved.training.items():
            group, _, key = name.rpartition("/")
            groups.setdefault(group, {})[key] = tensor
        own = {name: self._own_rows(tensor) for name, tensor in groups["memory"].items()}
        self.memory = type(self.memory).from_tensors(own, like=self.memory).to(self.device)
        for name, parameter in self.model.named_parameters():
            if values := groups.get(f"optimizer/{name}"):
                # Fused updates trust these sizes and types.
                form = (parameter.shape, parameter.dtype)
                forms = {"step": (torch.Size(()), torch.float32)}
                forms |= {"exp_avg": form, "exp_avg_sq": form}
                if {key: (value.shape, value.dtype) for key, value in values.items()} != forms:
                    raise TypeError(f"the optimiser's state of {name} has another form")
                self.optimizer.state[parameter] = {
                    key: value if key == "step" else placed(value.to(self.device), parameter)
                    for key, value in values.items()
                }
        self.step = saved.state["step"]
        self._own_draws()
        # A row for each process; more processes than there were draw anew.
        for name, states in groups["random"].items():
            states = states.reshape(-1, states.shape[-1])
            if self.processes.rank < len(states):
                # A copy: torch crashes on a state that begins inside another tensor.
                state = states[self.processes.rank].clone()
                if name == "cpu":
                    torch.set_rng_state(state)
                elif self.device.type == "cuda":
                    torch.cuda.set_rng_state(state, self.device)
        before = max(saved.state["step"] - 1, 0)
        self.streams.set_segment_length(self.config.train.segment_length_at(before))
        self.streams.load_state_dict(saved.state["streams"])
        self.best_step = saved.state["best_step"]
        counts = saved.state["health"]
        if not all(type(count) is int and count >= 0 for count in counts.values()):
            raise TypeError(f"its health is {counts}")
        self.health = Health(**counts)
        self.best = math.inf if saved.state["best"] is None else saved.state["best"]

    def _own_rows(self, x: Tensor) -> Tensor:
        own = local(x)
        return x[self.rows] if own is x and self.mesh is not None else own

    # --- validation and reports -----------------------------------------------------------------

    def score(self, batch_size: int) -> Scores:
        """Score the validation split's first ``evaluate_tokens`` tokens, from an empty memory."""
        tokens, text = self._validation()
        self.model.eval()
        batch_size = min(batch_size, len(tokens))
        return evaluate(
            self.passes.scored,
            tokens,
            text,
            batch_size=batch_size,
            segment_length=min(self.config.train.segment_length, len(tokens)),
            processes=self.processes if batch_size % self.processes.size == 0 else ALONE,
        )

    def sample(self, n_tokens: int) -> str:
        """Text that the model writes after a line break, always with the same draws."""
        self.model.eval()
        reader = self.passes.scored.reader(batch_size=1)
        decoder = self.prepared.tokenizer.stream_decoder()
        logits = read_prompt(reader, self.prepared.tokenizer.encode(b"\n"), 1)
        draws = generate(reader, logits, n_tokens, Sampling(temperature=0.8, seed=1))
        return "".join(decoder.push(ids[0]) for ids in draws)

    def _validation(self) -> tuple[Any, bytes]:
        split = self.prepared.splits["validation"].tokens
        wanted = self.config.train.evaluate_tokens or len(split)
        tokens = split[:wanted]
        return tokens, self.prepared.tokenizer.decode(tokens)

    @torch.no_grad()
    def _validation_statistics(self) -> dict[str, float]:
        """What the architecture tells about a sample of the validation split, layer by layer."""
        if not self.statistics:
            return {}
        tokens, _ = self._validation()
        batch_size = min(self.config.train.batch_size, len(tokens))
        segments = evaluation_segments(
            tokens, batch_size, min(self.config.train.segment_length, len(tokens))
        )
        scored = self.passes.scored
        reader = scored.reader(batch_size=batch_size)
        read = [inputs.to(self.device) for inputs, _, _ in islice(segments, STATISTICS_SEGMENTS)]
        for inputs in read[:-1]:
            reader.read(inputs)
        return by_layer(scored(read[-1], reader.memory).statistics)

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
            **self._validation_statistics(),
        )
        self.console.print(
            f"step {self.step:>6,}  validation {scores.bits_per_byte:.4f} bits per byte  "
            f"({scores.nats_per_token:.4f} nats per token)"
        )
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
        bits = nats / math.log(2) / self.bytes_per_token
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
        show(loss=nats, bits=bits, speed=speed)

    def _introduce(self) -> None:
        text, count = self.prepared.splits["train"], sum(p.numel() for p in self.model.parameters())
        options = self.config.train
        passes = options.batch_size * options.tokens_read(options.steps) / len(text.tokens)
        self.console.print(
            f"{self.config.architecture}, {count:,} parameters, on {self.device}\n"
            f"corpus {self.config.data.corpus}: {len(text.tokens):,} training tokens "
            f"({self.prepared.tokenizer.kind}), read {passes:.2f} times in "
            f"{options.steps:,} steps\nrun folder {self.folder}",
            highlight=False,
        )

    def _conclude(self) -> None:
        if self.health != Health():
            self.console.print(f"{self.health}", highlight=False)
        tokens, text = self._validation()
        scores = self.score(1)
        whole = len(tokens) == len(self.prepared.splits["validation"].tokens)
        part = "the validation split" if whole else "the validation split's first part"
        baseline = 8 * len(lzma.compress(text, preset=9)) / len(text)
        say = self.console.print
        say(f"\nfinal score on {part}, {scores.tokens:,} tokens in one stream, memory carried:")
        say(
            f"  {self.config.architecture:<16} {scores.bits_per_byte:.3f} bits per byte   "
            f"(perplexity per token {scores.perplexity:.2f})"
        )
        say(f"  {'lzma':<16} {baseline:.3f} bits per byte   (the same text)")
        if self.config.train.sample_tokens:
            sample = self.sample(self.config.train.sample_tokens)
            say("\nsample:", style="bold")
            say(sample, markup=False, highlight=False)
        pictures = metrics.plot(self.folder)
        say("\nwritten:", style="bold")
        say(f"  run folder  {self.folder}\n  metrics     {self.folder / 'metrics.jsonl'}")
        for picture in pictures:
            say(f"  picture     {picture}")
        if not pictures:
            say("  no picture: pip install 'memspan[plot]' for loss.png")
        say(
            f"next: memspan evaluate {self.folder}   or   "
            f"memspan generate {self.folder} --prompt 'def '"
        )

    def _stopping(self) -> bool:
        """Whether to stop before the next update: all processes do, or none."""
        self.interrupted = self.processes.any(self.asked_to_stop)
        return self.interrupted

    def _tokens_read(self) -> int:
        options = self.config.train
        return options.batch_size * options.tokens_read(self.step)

    def _precision(self) -> torch.autocast:
        wanted = self.config.train.precision
        bfloat16 = wanted == "bfloat16" or (wanted == "auto" and self.device.type == "cuda")
        return torch.autocast(self.device.type, torch.bfloat16, enabled=bfloat16)

    @contextmanager
    def _stoppable(self) -> Iterator[None]:
        """Turn the first Ctrl-C or SIGTERM into a checkpoint; a second one stops at once."""

        def stop(number: int, frame: Any) -> None:
            self.asked_to_stop = True
            for signal_number, handler in before.items():
                signal.signal(signal_number, handler)

        try:
            before = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not in the main thread: signals are someone else's
            before = {}
        try:
            yield
        finally:
            for signal_number, handler in before.items():
                signal.signal(signal_number, handler)

    @contextmanager
    def _progress(self) -> Iterator[Callable[..., None]]:
        columns = (
            TextColumn("step {task.completed:,.0f}/{task.total:,.0f}"),
            BarColumn(bar_width=20),
            TextColumn(
                "loss {task.fields[loss]:.3f}  {task.fields[bits]:.3f} bits/byte  "
                "{task.fields[speed]:,.0f} tokens/s  left"
            ),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console, transient=True) as progress:
            task = progress.add_task(
                "", total=self.config.train.steps, loss=math.nan, bits=math.nan, speed=0
            )
            progress.update(task, completed=self.step)
            yield lambda **fields: progress.update(task, completed=self.step, **fields)


def by_layer(statistics: dict[str, Tensor]) -> dict[str, float]:
    """``{"loss": [L]}`` as ``{"loss/layer_1": ..., ...}``."""
    return {
        f"{name}/layer_{n}": value
        for name, values in statistics.items()
        for n, value in enumerate(values.tolist(), 1)
    }


def learning_rate(step: int, config: RunConfig[Any]) -> float:
    """Learning rate of the update that follows ``step`` updates: linear warm-up, then the schedule."""
    optim, steps = config.optim, config.train.steps
    if step < optim.warmup_steps:
        return optim.learning_rate * (step + 1) / optim.warmup_steps
    if optim.schedule == "inverse-sqrt":
        return optim.learning_rate * math.sqrt(max(optim.warmup_steps, 1) / (step + 1))
    if optim.schedule == "constant":
        return optim.learning_rate
    done = (step - optim.warmup_steps) / max(1, steps - optim.warmup_steps)
    floor = min(optim.min_learning_rate, optim.learning_rate)
    return floor + (optim.learning_rate - floor) * (1 + math.cos(math.pi * done)) / 2


def device_for(name: str) -> torch.device:
    """``auto`` is CUDA where there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=name).item()
        return torch.device(name)
    except (RuntimeError, AssertionError):
        raise MemspanError(f"there is no device {name!r} here: use cpu") from None


def _optimizer(model: LanguageModel, config: OptimConfig) -> torch.optim.AdamW:
    decayed: list[Tensor] = []
    free: list[Tensor] = []
    for name, parameter in model.named_parameters():
        (decayed if parameter.dim() >= 2 and "bias" not in name else free).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": free, "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=True,
    )


def _with_position_table(config: RunConfig[Any]) -> RunConfig[Any]:
    """Size learned position tables for the spans that training uses, where not set."""
    model = config.model
    if getattr(model, "positions", None) != "learned" or model.max_distance is not None:
        return config
    span = model.memory_length + getattr(model, "compressed_length", 0)
    if getattr(model, "attention_span", "segment") == "segment":
        span += config.train.segment_length
    return dataclasses.replace(config, model=dataclasses.replace(model, max_distance=span))


def _identity(prepared: Prepared) -> str:
    """What makes a corpus the same: the tokens that were trained on."""
    return prepared.splits["train"].sha256
