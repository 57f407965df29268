"""Proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347) with a memory, in one file.

    python examples/ppo.py                                        # a cart whose speeds are hidden
    python examples/ppo.py --environment repeat --memory gated-delta-net --out repeat.jsonl
    python examples/ppo.py --environment CartPole-v1 --memory none

A policy reads vectors step by step, and carries a memory for each environment:

- **Acting** is a reader that stands in all environments at once. An episode that ends empties its
  environment's memory and no other's.
- **A window** is what was seen between two updates, and the memory with which it began. It is read
  again in one parallel forward pass from that memory, in which episodes begin where they began, and
  gradients flow through it. With the weights of acting, its log-probabilities are those of acting.
- **The memory of a window's end** is kept over the update. It was made by earlier weights, as it is
  wherever memories are stored (Kapturowski et al. 2019 for recurrent replay).

Needs gymnasium, and popgym for its environments: pip install '.[agents]'.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
import tyro
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn
from torch.distributions import Categorical

from gru import GRUConfig
from memspan import Memory, MemspanError
from memspan.models import (
    BackboneConfig,
    CompressiveConfig,
    FastWeightsConfig,
    FeedbackConfig,
    GatedDeltaNetConfig,
    LSTMConfig,
    TransformerXLConfig,
)


@dataclass(frozen=True)
class Options:
    """Options of the training."""

    environment: str = "cartpole"
    """cartpole: POPGym's PositionOnlyCartPole, whose speeds are hidden. repeat: its
    RepeatPreviousEasy, which asks for the card of three steps ago. Otherwise the name of one of
    gymnasium's."""
    memory: Literal[
        "transformer-xl", "gated-transformer-xl", "compressive", "feedback", "fast-weights",
        "gated-delta-net", "lstm", "gru", "none",
    ] = "transformer-xl"  # fmt: skip
    """Architecture. none: every step is seen alone."""
    layers: int = 2
    """Layers of the architecture."""
    width: int = 64
    """Width of the vectors."""
    span: int = 32
    """Steps that are remembered, where an architecture sets a number."""
    steps: int = 300_000
    """Environment steps in all."""
    environments: int = 16
    """Environments that are stepped together."""
    window: int = 64
    """Steps of each environment between two updates."""
    epochs: int = 4
    """Passes over what was seen."""
    minibatches: int = 4
    """Updates of a pass, each of some environments' windows."""
    learning_rate: float = 1e-3
    """At the start; it falls linearly to nothing."""
    discount: float = 0.99
    """Gamma."""
    trace: float = 0.95
    """Lambda of generalised advantage estimation (Schulman et al. 2015, arXiv 1506.02438)."""
    clip: float = 0.2
    """Limit to the move of a probability in an update, as a share."""
    entropy: float = 0.01
    """Weight of the policy's entropy."""
    value: float = 0.5
    """Weight of the value's error."""
    seed: int = 1
    """Seed of the weights, the environments and the draws."""
    out: Path | None = None
    """JSON Lines of returns over steps and CPU seconds (None: only shown)."""

    def __post_init__(self) -> None:
        counts = ("steps", "environments", "window", "epochs", "minibatches")
        if wrong := [f"--{name}" for name in counts if getattr(self, name) < 1]:
            raise SystemExit(f"{', '.join(wrong)} must be at least 1")
        if self.environments % self.minibatches:
            raise SystemExit("--environments must be a multiple of --minibatches")


# ----- Environments and architectures


def make_environment(name: str) -> gymnasium.Env[Any, Any]:
    if name == "cartpole":
        from popgym.envs.position_only_cartpole import PositionOnlyCartPole

        return PositionOnlyCartPole()
    if name == "repeat":
        from popgym.envs.repeat_previous import RepeatPreviousEasy

        return RepeatPreviousEasy()
    return gymnasium.make(name)


def check_spaces(environment: gymnasium.vector.VectorEnv[Any, Any, Any]) -> None:
    """Refuse what :func:`vectors` and :class:`Agent` were not written for."""
    seen = environment.single_observation_space
    done = environment.single_action_space
    if not isinstance(done, Discrete):
        raise SystemExit(f"the actions are {done}, and this policy chooses from a Discrete space")
    if not isinstance(seen, Discrete) and (not isinstance(seen, Box) or len(seen.shape) != 1):
        kind = f"{type(seen).__name__} {list(seen.shape or ())}"
        raise SystemExit(
            f"the observations are {kind}, and this policy sees vectors or numbers: put an encoder "
            "in place of Agent.inputs"
        )


def backbone_of(options: Options) -> BackboneConfig:
    """Two thirds of a layer's numbers in its feed-forward sub-layer, where it has one."""
    sizes: dict[str, Any] = {"n_layers": options.layers, "d_model": options.width}
    attention = sizes | {"n_heads": 4, "d_ff": 4 * options.width}
    # With a fixed span a step sees as many others whether it was read alone or in a window.
    # A span of one step is that step itself.
    span = options.span if options.memory != "none" else 1
    xl = TransformerXLConfig(**attention, memory_length=span, attention_span="fixed")
    configs: dict[str, Callable[[], BackboneConfig]] = {
        "transformer-xl": lambda: xl,
        "gated-transformer-xl": lambda: replace(xl, gating="gru"),
        "compressive": lambda: CompressiveConfig(
            **attention, memory_length=options.span, compressed_length=options.span // 2
        ),
        "feedback": lambda: FeedbackConfig(**attention, memory_length=options.span),
        "fast-weights": lambda: FastWeightsConfig(**attention),
        "gated-delta-net": lambda: GatedDeltaNetConfig(**attention),
        "lstm": lambda: LSTMConfig(**sizes),
        "gru": lambda: GRUConfig(**sizes),
        "none": lambda: xl,
    }
    return configs[options.memory]()


# ----- Policy


@dataclass
class Windows:
    """Observations of ``T`` steps of ``B`` environments."""

    memory: Memory
    """With which they began, B rows."""
    observations: Tensor
    """``[B, T, N]``."""
    starts: Tensor
    """bool ``[B, T]``: an episode begins here."""
    actions: Tensor
    """int64 ``[B, T]``."""
    log_probabilities: Tensor
    """``[B, T]``, of the actions when they were drawn."""
    values: Tensor
    """``[B, T]``, as they were estimated."""
    rewards: Tensor
    """``[B, T]``."""
    next_observations: Tensor
    """``[B, N]``, after the last step."""
    next_starts: Tensor
    """bool ``[B]``."""

    def advantages(self, after: Tensor, discount: float, trace: float) -> Tensor:
        """``[B, T]``; ``after [B]`` are the values of what comes next."""
        advantages = torch.empty_like(self.rewards)
        advantage = torch.zeros_like(after)
        begins = self.next_starts
        value = after
        for t in reversed(range(self.rewards.shape[1])):
            # What comes next counts unless an episode begins there.
            surprise = self.rewards[:, t] + discount * value * ~begins - self.values[:, t]
            advantage = surprise + discount * trace * advantage * ~begins
            advantages[:, t] = advantage
            begins = self.starts[:, t]
            value = self.values[:, t]
        return advantages


class Agent(nn.Module):
    """Observations to vectors, a backbone with a memory, an action and a value."""

    def __init__(self, config: BackboneConfig, n_inputs: int, n_actions: int) -> None:
        super().__init__()
        d = config.d_model
        self.inputs = nn.Linear(n_inputs, d)
        self.backbone = config.build()
        self.norm = nn.LayerNorm(d)
        self.actor = nn.Linear(d, n_actions)
        self.critic = nn.Linear(d, 1)
        nn.init.orthogonal_(self.inputs.weight)
        # Nearly all actions alike at first.
        nn.init.orthogonal_(self.actor.weight, 0.01)
        nn.init.zeros_(self.actor.bias)

    def judged(self, hidden: Tensor) -> tuple[Categorical, Tensor]:
        """Policy and value: ``[..., D]`` to a distribution and ``[...]``."""
        hidden = self.norm(hidden)
        return Categorical(logits=self.actor(hidden)), self.critic(hidden).squeeze(-1)

    def forward(
        self, observations: Tensor, memory: Memory, starts: Tensor
    ) -> tuple[Categorical, Tensor, Tensor]:
        """Whole windows at once: distributions, values ``[B, T]``, the architecture's own loss."""
        out = self.backbone(self.inputs(observations), memory, starts=starts)
        return *self.judged(out.hidden), out.auxiliary_loss


def vectors(observations: np.ndarray, space: gymnasium.Space[Any]) -> Tensor:
    """``[B, N]``: a number of a choice as a one among zeros, a vector as it is."""
    found = torch.as_tensor(observations)
    if isinstance(space, Discrete):
        return nn.functional.one_hot(found.long(), int(space.n)).float()
    return found.float()


# ----- Acting


class Rollouts:
    """Acts in all environments, window by window."""

    def __init__(self, options: Options) -> None:
        make = [lambda: make_environment(options.environment)] * options.environments
        # An episode's first observation comes in place of the last one's end.
        self.environments = SyncVectorEnv(make, autoreset_mode=AutoresetMode.SAME_STEP)
        check_spaces(self.environments)
        self.space = self.environments.single_observation_space
        observations, _ = self.environments.reset(seed=options.seed)
        self.observations = vectors(observations, self.space)
        self.starts = torch.ones(options.environments, dtype=torch.bool)
        self.returns: deque[float] = deque(maxlen=100)
        self._running = np.zeros(options.environments)

    @torch.no_grad()
    def windows(self, agent: Agent, memory: Memory, length: int) -> tuple[Windows, Memory]:
        """The next ``length`` steps from ``memory``, and the memory after them."""
        reader = agent.backbone.reader(memory, len(self.starts))
        seen: list[tuple[Tensor, ...]] = []
        for _ in range(length):
            reader.reset(self.starts)
            hidden = reader.step(agent.inputs(self.observations))
            policy, values = agent.judged(hidden)
            actions = policy.sample()
            step = self.environments.step(actions.numpy())
            rewards = torch.as_tensor(step[1]).float()
            chosen = actions, policy.log_prob(actions)
            seen.append((self.observations, self.starts, *chosen, values, rewards))
            # An episode that is cut short counts as one that ended, as in CleanRL.
            self._note(step[1], ended := step[2] | step[3])
            self.observations = vectors(step[0], self.space)
            self.starts = torch.as_tensor(ended)
        together = (torch.stack(each, 1) for each in zip(*seen, strict=True))
        return Windows(memory, *together, self.observations, self.starts), reader.memory

    def _note(self, rewards: np.ndarray, ended: np.ndarray) -> None:
        self._running += rewards
        self.returns.extend(self._running[ended].tolist())
        self._running[ended] = 0


# ----- Learning


def learn(
    agent: Agent,
    optimiser: torch.optim.Optimizer,
    windows: Windows,
    after: Memory,
    options: Options,
) -> None:
    """Updates from what was seen; ``after`` is the memory at the windows' end."""
    with torch.no_grad():
        following = agent(
            windows.next_observations[:, None], after, windows.next_starts[:, None]
        )[1][:, 0]  # fmt: skip
    advantages = windows.advantages(following, options.discount, options.trace)
    returns = advantages + windows.values
    for _ in range(options.epochs):
        for rows in torch.randperm(options.environments).chunk(options.minibatches):
            memory = windows.memory.select(rows)
            policy, values, auxiliary = agent(
                windows.observations[rows], memory, windows.starts[rows]
            )
            ratio = policy.log_prob(windows.actions[rows]) - windows.log_probabilities[rows]
            ratio = ratio.exp()
            gain = advantages[rows]
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
            clipped = ratio.clamp(1 - options.clip, 1 + options.clip)
            loss = -torch.minimum(ratio * gain, clipped * gain).mean()
            loss = loss + options.value * (values - returns[rows]).square().mean() / 2
            loss = loss - options.entropy * policy.entropy().mean() + auxiliary
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimiser.step()


def train(options: Options) -> Iterator[dict[str, float]]:
    """Train; after each update: steps, CPU seconds, the mean return of the last 100 episodes."""
    torch.manual_seed(options.seed)
    rollouts = Rollouts(options)
    n_actions = int(rollouts.environments.single_action_space.n)  # type: ignore[attr-defined]
    agent = Agent(backbone_of(options), rollouts.observations.shape[1], n_actions)
    optimiser = torch.optim.Adam(agent.parameters(), eps=1e-5)
    memory = agent.backbone.initial_memory(options.environments)
    per_update = options.environments * options.window
    n_updates = max(options.steps // per_update, 1)
    started = time.process_time()
    for update in range(n_updates):
        optimiser.param_groups[0]["lr"] = options.learning_rate * (1 - update / n_updates)
        windows, memory = rollouts.windows(agent, memory, options.window)
        learn(agent, optimiser, windows, memory, options)
        returns = rollouts.returns
        yield {
            "steps": (update + 1) * per_update,
            "cpu_seconds": round(time.process_time() - started, 2),
            "return": round(sum(returns) / len(returns), 4) if returns else float("nan"),
        }


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    torch.set_num_threads(1)
    shown = 0.0
    try:
        # Row by row: what was measured is kept, whatever happens.
        with nullcontext() if options.out is None else options.out.open("w") as file:
            for row in train(options):
                if file is not None:
                    print(json.dumps(row), file=file, flush=True)
                if not (waiting := time.monotonic() - shown < 2):
                    shown = time.monotonic()
                    print(line(row), flush=True)
            if waiting:
                print(line(row))
    except KeyboardInterrupt:
        print("interrupted")
        sys.exit(130)
    except (MemspanError, gymnasium.error.Error, OSError) as error:
        sys.exit(f"error: {error}")


def line(row: dict[str, float]) -> str:
    return f"{row['steps']:>9,} steps {row['cpu_seconds']:6.0f} CPU s   return {row['return']:.3f}"


if __name__ == "__main__":
    main()
