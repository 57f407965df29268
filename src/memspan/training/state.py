"""All that the next step of a run depends on, and its way into a checkpoint and back."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from memspan.data.identity import identity
from memspan.data.prepared import Prepared
from memspan.data.streams import Streams
from memspan.distributed.passes import passes
from memspan.distributed.processes import ALONE, Processes, local, placed, sharded
from memspan.errors import MemspanError
from memspan.memory import Memory
from memspan.models import LanguageModel
from memspan.runs.options import RunConfig
from memspan.runs.run import Run
from memspan.runs.state_file import Checkpoint, State
from memspan.runs.weights import load_weights, weights_of
from memspan.training import metrics
from memspan.training.environment import environment
from memspan.training.health import Health
from memspan.training.optimisation import adamw
from memspan.training.precision import precision_of
from memspan.training.sizes import refuse_oversized_training
from memspan.training.warm_start import initialise_from


class TrainingState:
    """Weights, memory, optimiser, place in the text, random numbers and counts of a run."""

    def __init__(
        self,
        config: RunConfig[Any],
        folder: Path,
        prepared: Prepared,
        device: torch.device,
        console: Console,
        processes: Processes = ALONE,
        start: Run | None = None,
    ) -> None:
        """``start``: a run whose weights are taken where they fit."""
        options = config.train
        self.processes, self.rows = processes, processes.rows(options.batch_size)
        if processes.size > 1 and (reason := config.model.one_process_only):
            raise MemspanError(reason)
        self.config, self.folder, self.prepared = config, folder, prepared
        self.device, self.console = device, console
        self.precision = precision_of(options, device)
        # Scores of all runs can be compared, and it is by them that the best weights are chosen.
        self.scoring_precision = dataclasses.replace(self.precision, products="float32")
        torch.manual_seed(options.seed)
        text = prepared.splits["train"]
        # First: refuses more rows than the text has before their memory is made.
        self.streams = Streams(
            text.tokens,
            options.batch_size,
            options.segment_length,
            text.document_starts if config.data.document_reset else None,
        )
        vocab_size = prepared.tokenizer.vocab_size
        refuse_oversized_training(config, vocab_size, self.rows.stop - self.rows.start, device)
        self.model = LanguageModel(vocab_size, config.model, config.embedding).to(device)
        if start is not None:
            console.print(initialise_from(self.model, prepared.tokenizer, start).summary())
        self.memory: Memory = self.model.initial_memory(self.rows.stop - self.rows.start)
        self.mesh = processes.mesh(device) if processes.size > 1 else None
        self.passes = passes(self.model, options.parallel, self.mesh)
        self.optimizer = adamw(self.model, config.optim)
        self.health = Health()
        self.step, self.best = 0, math.inf
        self.best_step: int | None = None
        self._own_draws()

    def taken(self) -> Checkpoint:
        """All of it as it is now; where processes share it, each one's part."""
        training = {f"memory/{name}": self._shared(t) for name, t in self.memory.tensors().items()}
        names = {id(p): name for name, p in self.model.named_parameters()}
        for parameter, values in self.optimizer.state.items():
            for key, value in values.items():
                training[f"optimizer/{names[id(parameter)]}/{key}"] = value
        training["random/cpu"] = self._shared_draws(torch.get_rng_state())
        if self.device.type == "cuda":
            training["random/cuda"] = self._shared_draws(torch.cuda.get_rng_state(self.device))
        state: State = {
            "step": self.step,
            "best": None if math.isinf(self.best) else self.best,
            "best_step": self.best_step,
            "streams": self.streams.state_dict(),
            "corpus": identity(self.prepared.splits),
            "record": self.prepared.record,
            "environment": self.environment(),
            "metrics": metrics.checksum(self.folder),
            "health": dataclasses.asdict(self.health),
        }
        return Checkpoint(weights_of(self.model), training, state)

    def environment(self) -> dict[str, Any]:
        """What the arithmetic depends on besides the options."""
        return environment(self.model, self.device, self.precision, self.processes.size)

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
        """The inverse of :meth:`taken`."""
        try:
            self._restore(saved)
        except (LookupError, RuntimeError, TypeError) as error:
            raise MemspanError(
                f"the latest checkpoint in {self.folder} does not fit its config.toml ({error}): "
                "restore both"
            ) from None

    def _restore(self, saved: Checkpoint) -> None:
        layout = self._layout()
        weights = {name: placed(tensor, layout.get(name)) for name, tensor in saved.weights.items()}
        load_weights(self.model, weights, self.folder)
        groups: dict[str, dict[str, Tensor]] = {}
        for name, tensor in saved.training.items():
            group, _, key = name.rpartition("/")
            groups.setdefault(group, {})[key] = tensor
        own = {name: self._own_rows(tensor) for name, tensor in groups["memory"].items()}
        self.memory = type(self.memory).from_tensors(own, like=self.memory).to(self.device)
        self._restore_optimizer(groups)
        self.step = saved.state["step"]
        self._own_draws()
        self._restore_draws(groups["random"])
        # Older versions did not count: the options that the run had from the start tell.
        counted = {"tokens_read": self.config.train.tokens_read(self.step)}
        self.streams.load_state_dict(counted | saved.state["streams"])
        self.best_step = saved.state["best_step"]
        counts = saved.state["health"]
        if not all(type(count) is int and count >= 0 for count in counts.values()):
            raise TypeError(f"its health is {counts}")
        self.health = Health(**counts)
        self.best = math.inf if saved.state["best"] is None else saved.state["best"]

    def _restore_optimizer(self, groups: dict[str, dict[str, Tensor]]) -> None:
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

    def _restore_draws(self, random: dict[str, Tensor]) -> None:
        # A row for each process; more processes than there were draw anew.
        for name, states in random.items():
            states = states.reshape(-1, states.shape[-1])
            if self.processes.rank < len(states):
                # A copy: torch crashes on a state that begins inside another tensor.
                state = states[self.processes.rank].clone()
                if name == "cpu":
                    torch.set_rng_state(state)
                elif self.device.type == "cuda":
                    torch.cuda.set_rng_state(state, self.device)

    def _own_rows(self, x: Tensor) -> Tensor:
        own = local(x)
        return x[self.rows] if own is x and self.mesh is not None else own
