"""Everything that the next step of a run depends on, saved to and restored from checkpoints."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from memspan.errors import MemspanError, counted
from memspan.lab.data.prepared import TokenizedCorpus
from memspan.lab.data.streams import Streams
from memspan.lab.data.token_files import identity
from memspan.lab.distributed.parallel import parallel_model
from memspan.lab.distributed.processes import ALONE, Processes, local, placed, sharded
from memspan.lab.runs.checkpoint_files import Checkpoint, State, load_weights, weights_of
from memspan.lab.runs.options import RunConfig
from memspan.lab.runs.run import Run
from memspan.lab.training.changes import environment
from memspan.lab.training.optimisers import MakeOptimiser, Optimiser
from memspan.lab.training.options import TrainConfig
from memspan.lab.training.warm_start import WarmStart, initialise_from
from memspan.memory import Memory
from memspan.models import LanguageModel
from memspan.models.options import BackboneConfig
from memspan.precision import AUTOMATIC, Precision, resolve


@dataclass
class Health:
    """Counts of updates and memory rows that were not finite; part of every checkpoint."""

    skipped_updates: int = 0
    """Updates skipped because the loss or a gradient was not finite."""
    reset_memory_rows: int = 0
    """Rows of memory emptied because they held NaN or infinity."""

    def __str__(self) -> str:
        return (
            f"{counted(self.skipped_updates, 'update')} skipped and "
            f"{counted(self.reset_memory_rows, 'row')} of memory emptied because they were not finite"
        )


def non_finite_rows(memory: Memory) -> Tensor | None:
    """bool ``[B]``: the rows that hold NaN or infinity; None if no row does."""
    floats = [t for t in memory.tensors().values() if t.is_floating_point() and t.numel()]
    # One pass in the usual case: a sum is finite only if all its terms are. Every device has float32;
    # if the sum overflows, each element is checked.
    if not floats or math.isfinite(sum(t.detach().sum(dtype=torch.float32) for t in floats)):
        return None
    rows = torch.stack([~t.isfinite().flatten(1).all(1) for t in floats]).any(0)
    return rows if rows.any() else None


def refuse_sharing(
    config: RunConfig[BackboneConfig], processes: Processes, begins: bool = False
) -> None:
    """Raise if the batch cannot be split over the processes, or a sharded run ``begins`` with one."""
    if begins and config.train.parallel == "fsdp" and processes.size == 1:
        raise MemspanError(
            "--train.parallel fsdp shares the model between processes, and there is only one: add "
            "--nproc 2 or more, or drop it"
        )
    processes.rows(config.train.batch_size)


def streams_of(config: RunConfig[BackboneConfig], prepared: TokenizedCorpus) -> Streams:
    """The training text in rows, as the run reads it; an error if it is too short for them."""
    text = prepared.splits["train"]
    starts = text.document_starts if config.data.document_reset else None
    return Streams(text.tokens, config.train.batch_size, config.train.segment_length, starts)


def precision_of(options: TrainConfig, device: torch.device) -> Precision:
    """The precision of a run with these options on ``device``."""
    return resolve(options.precision, options.matmul_precision, AUTOMATIC, device)


class TrainingState:
    """Weights, memory, optimiser, place in the text, random numbers and counts of a run."""

    def __init__(
        self,
        config: RunConfig[BackboneConfig],
        prepared: TokenizedCorpus,
        device: torch.device,
        processes: Processes = ALONE,
        source: Run | None = None,
        optimiser: MakeOptimiser | None = None,
    ) -> None:
        """The state before the first step, in each of ``processes``, with the weights of ``source``."""
        options = config.train
        refuse_sharing(config, processes)
        self.processes = processes
        self.rows = processes.rows(options.batch_size)
        self.config = config
        self.prepared = prepared
        self.device = device
        self.precision = precision_of(options, device)
        torch.manual_seed(options.seed)
        # First: refuses more rows than the text has before memory is made for them.
        self.streams = streams_of(config, prepared)
        self.steps = options.updates(self.streams.row_length)
        """Total number of updates of the run."""
        vocab_size = prepared.tokenizer.vocab_size
        n_rows = self.rows.stop - self.rows.start
        self.model = LanguageModel(vocab_size, config.model, config.embedding).to(device)
        self.model.recompute = options.recompute
        self.warm_start: WarmStart | None = None
        """Tensors taken from ``source``."""
        if source is not None:
            self.warm_start = initialise_from(self.model, prepared.tokenizer, source)
        self.memory: Memory = self.model.initial_memory(n_rows)
        self.mesh = processes.mesh(device) if processes.size > 1 else None
        self.parallel = parallel_model(self.model, options.parallel, self.mesh)
        self.optimiser = Optimiser(self.model, config.optim, optimiser)
        self.health = Health()
        self.step = 0
        self.best = math.inf
        self.best_step: int | None = None
        self.unimproved = 0
        """Validations in a row that did not lower the best score by early stopping's threshold."""
        self._seed_this_process()

    @property
    def tokens_read(self) -> int:
        """Tokens of the training text read so far, over all rows and passes through it."""
        return self.config.train.batch_size * self.streams.tokens_read

    @cached_property
    def unknown_share(self) -> float:
        """The share of training tokens that stand for unknown text, in [0, 1]."""
        tokens = self.prepared.splits["train"].tokens
        return self.prepared.tokenizer.count_unknown(tokens) / len(tokens)

    def empty_non_finite_rows(self) -> None:
        """Empty rows of memory that are not finite, and count those of all processes."""
        rows = non_finite_rows(self.memory)
        if rows is not None:
            self.memory = self.memory.reset(rows)
        n_rows = 0 if rows is None else int(rows.sum())
        self.health.reset_memory_rows += int(self.processes.total(n_rows))

    @property
    def stops_early(self) -> bool:
        """True if the score has not improved for as many validations as the options allow."""
        patience = self.config.train.early_stopping_patience
        return patience is not None and self.unimproved >= patience

    @property
    def is_finished(self) -> bool:
        """True if all updates have been made, or training stops early."""
        return self.step >= self.steps or self.stops_early

    def patience_in_words(self) -> str:
        """The reason to stop early, in words."""
        threshold = self.config.train.early_stopping_threshold
        by = f" by more than {threshold:g} nats per token" if threshold else ""
        last = counted(self.unimproved, "validation")
        best = "not finite" if self.best_step is None else f"that of step {self.best_step:,}"
        return f"the last {last} did not lower the best loss{by}; it is {best}"

    def note_score(self, nats_per_token: float) -> None:
        """Remember this step if its score is the best so far, and count it otherwise; all processes use
        the first one's score."""
        nats_per_token = self.processes.of_first(nats_per_token)
        improves = nats_per_token < self.best - self.config.train.early_stopping_threshold
        self.unimproved = 0 if improves else self.unimproved + 1
        if nats_per_token < self.best:
            self.best = nats_per_token
            self.best_step = self.step

    def snapshot(self) -> Checkpoint:
        """The current state; for whatever is shared, this process's part."""
        training = {f"memory/{name}": self._shared(t) for name, t in self.memory.tensors().items()}
        training |= {f"optimizer/{name}": t for name, t in self.optimiser.tensors().items()}
        training["random/cpu"] = self._shared_generator(torch.get_rng_state())
        if self.device.type == "cuda":
            training["random/cuda"] = self._shared_generator(torch.cuda.get_rng_state(self.device))
        state: State = {
            "step": self.step,
            "best": None if math.isinf(self.best) else self.best,
            "best_step": self.best_step,
            "unimproved": self.unimproved,
            "streams": self.streams.state_dict(),
            "corpus": identity(self.prepared.splits),
            "record": self.prepared.corpus.record,
            "environment": self.environment(),
            "health": dataclasses.asdict(self.health),
            "optimiser": self.optimiser.name,
        }
        return Checkpoint(weights_of(self.model), training, state)

    def environment(self) -> dict[str, object]:
        """Versions, devices and settings that rounding depends on besides the options."""
        return environment(self.model, self.device, self.precision, self.processes.size)

    def _shared(self, rows: Tensor) -> Tensor:
        """This process's rows as its shard of all rows; a copy, since fields may share a tensor."""
        return rows if self.mesh is None else sharded(rows.clone(), self.mesh)

    def _shared_generator(self, state: Tensor) -> Tensor:
        """The state of a random generator, as this process's row if there are several."""
        if self.mesh is None:
            return state
        return sharded(state[None], self.processes.mesh(state.device))

    def target(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Allocate the destination of a checkpoint's tensor: all of it, or this process's shard."""
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
        """Parameters and buffers by name, with how processes share them."""
        return dict(self.model.state_dict(keep_vars=True))

    def _seed_this_process(self) -> None:
        """Seed this process; rank 0 keeps the single-process stream."""
        if self.processes.rank:
            seed = f"{self.config.train.seed} {self.step} {self.processes.rank}"
            torch.manual_seed(int(hashlib.sha256(seed.encode()).hexdigest()[:15], 16))

    def restore(self, saved: Checkpoint, folder: Path) -> None:
        """The inverse of :meth:`snapshot`."""
        ours = self.optimiser.name
        theirs = saved.state.get("optimiser")
        if theirs not in (None, ours):
            raise MemspanError(
                f"{folder} was trained by {theirs}, not by {ours}: resume it with the function that "
                "made its optimiser, or start a new run"
            )
        try:
            self._restore(saved, folder)
        except (LookupError, RuntimeError, TypeError) as error:
            is_own = self.config.optim.optimiser == "own"
            also = ", and resume with the function that made its optimiser" if is_own else ""
            raise MemspanError(
                f"the latest checkpoint in {folder} does not fit its config.toml ({error}): "
                f"restore both{also}"
            ) from None

    def _restore(self, saved: Checkpoint, folder: Path) -> None:
        # A run converted from another program's checkpoint has weights alone.
        if saved.training or saved.state["step"]:
            self._restore_training(saved)
        layout = self._layout()
        # Last, since the optimiser has tried a step.
        weights = {name: placed(tensor, layout.get(name)) for name, tensor in saved.weights.items()}
        load_weights(self.model, weights, folder)

    def _restore_training(self, saved: Checkpoint) -> None:
        groups: dict[str, dict[str, Tensor]] = {}
        for name, tensor in saved.training.items():
            group, _, key = name.rpartition("/")
            groups.setdefault(group, {})[key] = tensor
        own = {name: self._own_rows(tensor) for name, tensor in groups["memory"].items()}
        self.memory = type(self.memory).from_tensors(own, like=self.memory).to(self.device)
        kept = {n: x for n, x in groups.items() if n.startswith("optimizer/")}
        self.optimiser.restore({n.removeprefix("optimizer/"): x for n, x in kept.items()})
        self.step = saved.state["step"]
        self._seed_this_process()
        for name, states in groups["random"].items():
            # A row for each process; processes beyond those that saved keep their new seeds.
            states = states.reshape(-1, states.shape[-1])
            if self.processes.rank < len(states):
                # Cloned: torch crashes on a state that is a view into another tensor.
                state = states[self.processes.rank].clone()
                if name == "cpu":
                    torch.set_rng_state(state)
                elif self.device.type == "cuda":
                    torch.cuda.set_rng_state(state, self.device)
        self.streams.load_state_dict(saved.state["streams"])
        read = self.streams.tokens_read
        self.steps = self.config.train.updates(self.streams.row_length, self.step, read)
        self.best_step = saved.state["best_step"]
        self.unimproved = saved.state["unimproved"]
        counts = saved.state["health"] | {"unimproved": self.unimproved}
        if not all(type(count) is int and count >= 0 for count in counts.values()):
            raise TypeError(f"its health is {counts}")
        self.health = Health(**saved.state["health"])
        self.best = math.inf if saved.state["best"] is None else saved.state["best"]

    def _own_rows(self, x: Tensor) -> Tensor:
        own = local(x)
        return x[self.rows] if own is x and self.mesh is not None else own
