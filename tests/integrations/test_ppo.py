"""examples/ppo.py: a window is read again as it was acted, through the ends of episodes."""

from __future__ import annotations

import dataclasses
import json
import sys
import typing
from pathlib import Path

import pytest
import torch

import ppo

MEMORIES = typing.get_args(typing.get_type_hints(ppo.Options)["memory"])
SMALL = ppo.Options(
    environment="repeat", layers=2, width=16, span=6, environments=4, minibatches=2, window=20
)


def acted(options: ppo.Options, n_windows: int) -> tuple[ppo.Agent, list[ppo.Windows]]:
    torch.manual_seed(0)
    rollouts = ppo.Rollouts(options)
    agent = ppo.Agent(ppo.backbone_of(options), rollouts.observations.shape[1], 4)
    # At first nearly all actions are alike, whatever is remembered.
    torch.nn.init.orthogonal_(agent.actor.weight, 3.0)
    memory = agent.backbone.initial_memory(options.environments)
    found = []
    for _ in range(n_windows):
        windows, memory = rollouts.windows(agent, memory, options.window)
        found.append(windows)
    return agent, found


def difference(agent: ppo.Agent, windows: ppo.Windows) -> float:
    """Between reading a window and acting in it: of log-probabilities, or of values."""
    policy, values, _ = agent(windows.observations, windows.memory, windows.starts)
    found = policy.log_prob(windows.actions)
    assert found.requires_grad
    pairs = ((found, windows.log_probabilities), (values, windows.values))
    return max((now - then).abs().max().item() for now, then in pairs)


@pytest.mark.smoke
@pytest.mark.parametrize("memory", MEMORIES)
def test_a_window_has_the_log_probabilities_of_acting(memory: str) -> None:
    # Three windows: episodes have 51 steps, so that some end inside of one.
    agent, found = acted(dataclasses.replace(SMALL, memory=memory), 3)
    assert any(windows.starts[:, 1:].any() for windows in found)
    assert agent.backbone.cut_invariant() == (memory != "compressive")
    most = max(difference(agent, windows) for windows in found)
    assert most > 1e-4 if memory == "compressive" else most < 3e-5
    if memory != "none":
        # What was remembered matters.
        emptied = dataclasses.replace(found[1], memory=found[0].memory)
        assert difference(agent, emptied) > 1e-3


def test_advantages_are_sums_over_what_follows_in_the_episode() -> None:
    """Discounted rewards less the value, where lambda is one."""
    _, (windows,) = acted(dataclasses.replace(SMALL, window=60), 1)
    after = torch.randn(4)
    found = windows.advantages(after, 0.9, 1.0)
    begins = torch.cat([windows.starts[:, 1:], windows.next_starts[:, None]], 1)
    assert begins.any()
    expected = torch.empty(4, 60)
    total = after
    for t in reversed(range(60)):
        total = windows.rewards[:, t] + 0.9 * total.where(~begins[:, t], 0)
        expected[:, t] = total - windows.values[:, t]
    torch.testing.assert_close(found, expected)


def test_it_learns_to_say_what_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward for the card that is shown: the whole way from a step to an update."""
    from popgym.envs.repeat_previous import RepeatPrevious

    monkeypatch.setattr(ppo, "make_environment", lambda _: RepeatPrevious(k=1))
    options = dataclasses.replace(
        SMALL, memory="gru", layers=1, steps=5_000, window=51, learning_rate=1e-2
    )
    rows = list(ppo.train(options))
    # Guessing gives -0.5.
    assert rows[-1]["return"] > 0.1 > -0.3 > rows[0]["return"]


def test_command_writes_a_row_for_each_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.jsonl"
    given = f"--memory gru --width 8 --steps 600 --window 20 --environments 4 --out {out}"
    monkeypatch.setattr(sys, "argv", ["ppo.py", *given.split()])
    ppo.main()
    rows = [json.loads(row) for row in out.read_text().splitlines()]
    assert [row["steps"] for row in rows] == [80 * (n + 1) for n in range(7)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--environment", "CartPol-v1"), "Did you mean: `CartPole`?"),
        (("--environments", "3"), "a multiple of --minibatches"),
    ],
)
def test_mistakes_are_one_line(
    given: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["ppo.py", *given])
    with pytest.raises(SystemExit, match=said) as caught:
        ppo.main()
    assert "\n" not in str(caught.value)
