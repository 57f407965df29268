"""One update of the weights: gradients accumulated over segments, clipped, and applied or skipped."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from memspan.errors import NonFiniteError
from memspan.lab.data.streams import Segment
from memspan.lab.distributed.processes import whole
from memspan.lab.training.optimisers import learning_rate
from memspan.lab.training.state import TrainingState
from memspan.models.output import Output
from memspan.nn import NOT_SCORED

MOST_SKIPS_IN_A_ROW = 50
"""Consecutive skipped updates after which training stops: it does not recover from there."""


class Updater:
    """Makes a run's updates; between them only the run's state is kept."""

    def __init__(self, state: TrainingState) -> None:
        self.state = state
        self.skips_in_a_row = 0
        self.statistics: Mapping[str, Tensor] = {}
        """Statistics of the last segment read, see :class:`~memspan.models.output.Output`."""

    def update(self) -> Tensor | None:
        """Read the next segments and update the weights once.

        Returns:
            The mean loss in nats per token, a scalar; None if the update was skipped because the loss
            or a gradient was not finite.

        Raises:
            NonFiniteError: one was not finite, and training is to stop then, or has not recovered after
                many skipped updates.
        """
        state = self.state
        config = self.state.config
        state.model.train()
        state.streams.set_segment_length(config.train.segment_length_at(state.step))
        n_segments = config.train.segments_per_update(state.step)
        segments = [state.streams.next() for _ in range(n_segments)]
        # The loss is the mean over all tokens scored. Every process sees all rows' targets.
        n_scored = sum(int((segment.targets != NOT_SCORED).sum()) for segment in segments)
        per_pass = max(n_scored, 1) / (n_segments * state.processes.size)
        with state.precision.float32_products():
            read = self._accumulate_gradients(segments, per_pass)
        state.empty_non_finite_rows()
        loss = torch.stack([losses.sum() / per_pass for _, losses in read]).mean()
        loss = state.processes.mean(loss)
        groups = state.model.clip_groups()
        gradients = [[p.grad for p in group if p.grad is not None] for group in groups]
        norms = [whole(torch.nn.utils.get_total_norm(group)) for group in gradients]
        state.step += 1
        if not all(map(math.isfinite, (loss, *norms))):
            self._skip(read)
            return None
        self.skips_in_a_row = 0
        for group, norm in zip(groups, norms, strict=True):
            limit = config.optim.clip_norm or math.inf
            torch.nn.utils.clip_grads_with_norm_(group, limit, norm)
        state.optimiser.step(learning_rate(state.step - 1, config.optim, state.steps))
        state.model.zero_grad()
        return loss

    def _accumulate_gradients(
        self, segments: list[Segment], per_pass: float
    ) -> list[tuple[Segment, Tensor]]:
        """Run one update's segments forward and backward; returns each with its losses ``[B, T]``.

        ``per_pass``: scored tokens per segment and process, a mean over the update.
        """
        state = self.state
        pending = torch.zeros((), device=state.device)
        read: list[tuple[Segment, Tensor]] = []
        for n, segment in enumerate(segments, 1):
            last = n == len(segments)
            with state.parallel.gradient_sync(last):
                output = self.read(segment)
                assert output.losses is not None
                loss = output.losses.sum() / per_pass + output.auxiliary_loss
                pending = pending + loss / len(segments)
                state.memory = output.memory
                self.statistics = output.statistics
                if n % state.config.train.gradient_segments == 0 or last:
                    pending.backward()
                    pending = torch.zeros((), device=state.device)
                    # The paper's stop-gradient: backpropagation ends at this segment's start.
                    state.memory = state.memory.detach()
            read.append((segment, output.losses.detach()))
        return read

    def read(self, segment: Segment) -> Output:
        """Read this process's rows of ``segment``, from the memory that they carry."""
        state = self.state
        with state.precision.autocast(state.device):
            return state.parallel(segment.part(state.rows, state.device), state.memory)

    def _skip(self, read: list[tuple[Segment, Tensor]]) -> None:
        """Skip the update; raise if asked to stop or after too many in a row."""
        state = self.state
        state.health.skipped_updates += 1
        self.skips_in_a_row += 1
        stop = state.config.train.non_finite == "stop"
        if stop or self.skips_in_a_row == MOST_SKIPS_IN_A_ROW:
            read = [(segment, state.processes.all_rows(losses)) for segment, losses in read]
            bad = [pair for pair in read if not pair[1].isfinite().all()]
            what = "loss" if bad else "gradient"
            if stop:
                more = ", or skip such updates with --train.non-finite skip"
            else:
                more = f"; {self.skips_in_a_row} updates in a row were skipped"
            raise NonFiniteError(
                f"the {what} is not finite at step {state.step} "
                f"({describe_position(*(bad or read)[0])}; {largest_gradients(state.model)}): lower "
                f"--optim.learning-rate, or set --optim.clip-norm{more}"
            )
        state.model.zero_grad()


def largest_gradients(model: nn.Module, n: int = 3) -> str:
    """The ``n`` parameters of ``model`` with the largest gradients and their norms, as text."""
    norms = {
        name: whole(p.grad.norm()).item()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    # NaN cannot be compared: it counts as the largest.
    order = sorted(norms, key=lambda name: math.inf if math.isnan(norms[name]) else norms[name])
    named = ", ".join(f"{name} {norms[name]:.3g}" for name in order[: -n - 1 : -1])
    return f"largest gradients: {named}"


def describe_position(segment: Segment, losses: Tensor) -> str:
    """The positions in the training text of the rows whose ``losses [B, T]`` are not finite, or of all
    rows if every loss is (and a gradient is not)."""
    bad = (~losses.isfinite()).any(1)
    rows = bad.nonzero()[:, 0].tolist() or list(range(len(bad)))
    length = segment.inputs.shape[1]
    named = [f"{first:,} to {first + length:,}" for first in segment.first[rows[:3]].tolist()]
    return f"tokens {', '.join(named)}{' and others' if len(rows) > 3 else ''} of the training text"
