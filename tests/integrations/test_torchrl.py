"""A backbone in TorchRL: slices are trained on as they were acted, by its own losses."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer
from torchrl.envs import Compose, GymEnv, InitTracker, SerialEnv, TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import ProbabilisticActor, set_recurrent_mode

import pages
from architectures import CASES
from memspan.errors import MemspanError
from memspan.lab.integrations.torchrl import MemoryModule
from memspan.models import BackboneConfig

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "agents.md"
CASE_NAMES = ("xl-fixed", "compressive", "feedback", "fast-delta", "gated", "lstm")
CONFIGS: dict[str, BackboneConfig] = {name: CASES[name].backbone for name in CASE_NAMES}


def parts(config: BackboneConfig) -> tuple[TransformedEnv, MemoryModule, ProbabilisticActor]:
    memory = MemoryModule(config.build())
    transforms = Compose(InitTracker(), memory.make_tensordict_primer())
    env = TransformedEnv(SerialEnv(2, partial(GymEnv, "CartPole-v1")), transforms)
    env.set_seed(0)
    encoder = TensorDictModule(nn.Linear(4, config.d_model), ["observation"], ["embedding"])
    head = TensorDictModule(nn.Linear(config.d_model, 2), ["hidden"], ["logits"])
    policy = ProbabilisticActor(
        TensorDictSequential(encoder, memory, head),
        in_keys=["logits"],
        distribution_class=torch.distributions.OneHotCategorical,
        return_log_prob=True,
    )
    return env, memory, policy


@torch.no_grad()
def acted(env: TransformedEnv, policy: ProbabilisticActor) -> TensorDict:
    """Steps of several episodes, ``[4, T]``; only the first and third row begin with one."""
    with set_exploration_type(ExplorationType.RANDOM):
        steps = env.rollout(60, policy, break_when_any_done=False).reshape(4, 30)
    assert steps["is_init"][:, 1:].any()
    assert steps["is_init"][:, 0].flatten().tolist() == [True, False, True, False]
    return steps


@pytest.mark.parametrize("name", CONFIGS)
def test_slices_have_the_log_probabilities_of_acting(name: str) -> None:
    env, memory, policy = parts(CONFIGS[name])
    steps = acted(env, policy)
    with set_recurrent_mode(True):
        found = policy.get_dist(steps.clone()).log_prob(steps["action"])
    off = (found - steps["action_log_prob"]).abs().max().item()
    assert (off < 1e-5) == memory.backbone.cut_invariant()
    # What it had read before a slice counts there.
    steps["memory"] = steps["memory"].apply(torch.zeros_like)
    with set_recurrent_mode(True):
        emptied = policy.get_dist(steps).log_prob(steps["action"])
    torch.testing.assert_close(emptied[::2], found[::2])
    assert (emptied - found).abs().max() > 1e-4


@pytest.mark.parametrize("name", ["xl-fixed", "fast-delta"])
def test_a_replay_buffers_slices_go_on_from_their_stored_memory(name: str) -> None:
    """Its sampler marks where they begin by ``is_init``, and returns them one after the other."""
    env, memory, policy = parts(CONFIGS[name])
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(200, ndim=2),
        sampler=SliceSampler(slice_len=6, end_key=("next", "done")),
        batch_size=60,
    )
    buffer.extend(acted(env, policy))
    slices = buffer.sample()
    begun = slices["is_init"].squeeze(-1)
    assert begun[::6].all()
    assert slices["memory", "tokens_seen"][begun].unique().numel() > 2
    with set_recurrent_mode(True):
        found = policy.get_dist(slices.clone()).log_prob(slices["action"])
    torch.testing.assert_close(found, slices["action_log_prob"], atol=1e-5, rtol=0)
    found.sum().backward()
    assert all(p.grad is not None for p in memory.parameters())


@torch.no_grad()
def test_a_step_that_begins_an_episode_is_read_from_an_empty_memory() -> None:
    env, memory, policy = parts(CONFIGS["lstm"])
    step = acted(env, policy)[:, 5]
    step["is_init"][:] = True
    emptied = step.clone().set("memory", step["memory"].apply(torch.zeros_like))
    torch.testing.assert_close(memory(step)["hidden"], memory(emptied)["hidden"])


def test_missing_specs_of_an_environment_are_named() -> None:
    """Without these, an episode would see the one before it, or nothing that came before."""
    _, memory, policy = parts(CONFIGS["lstm"])
    for transform, said in (
        (memory.make_tensordict_primer(), r"put InitTracker\(\) into"),
        (InitTracker(), r"no entry 'memory' to go on from: put .* make_tensordict_primer\(\) into"),
    ):
        with pytest.raises(MemspanError, match=said):
            TransformedEnv(GymEnv("CartPole-v1"), transform).rollout(3, policy)


def test_another_backbones_memory_is_refused() -> None:
    env, _, policy = parts(CONFIGS["fast-delta"])
    steps = acted(env, policy)
    other = MemoryModule(CONFIGS["gated"].build())
    with set_recurrent_mode(True), pytest.raises(MemspanError, match="make_tensordict_primer"):
        other(steps)
    with set_recurrent_mode(True), pytest.raises(MemspanError, match="time"):
        other(steps[0, 0])


def test_the_guides_code_runs() -> None:
    gradients = [parameter.grad for parameter in pages.run(GUIDE)["memory"].parameters()]
    assert gradients
    assert all(gradient is not None and gradient.any() for gradient in gradients)
