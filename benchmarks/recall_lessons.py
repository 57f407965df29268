"""Teach a model to recall who is where, before it reads the corpus `recall` as a whole.

Few of that corpus's words can be known by recalling, and in a minute of training most architectures
learn the others alone. Here a model is scored on the answers only, and reads about two people at first;
when it answers well there are more, until there are all twelve. Fast Weights needed another beginning:
rows about two people beside rows about more, each about the same people all the time.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from memspan.lab.data.recall import FILLER, FILLERS, LINES, NAMES, PLACES
from memspan.lab.runs.run import Run

QUESTIONS = 0.45
"""Share of questions among sentences: more than in the corpus, so that more can be learned."""
SCENE = (60, 240)
"""Words of a scene, at least and at most. Each is about some of the people."""
FEWEST = 2
SCORED = 50
"""Updates over which the loss is averaged, to see if answers are good enough for more people."""
WAIT = 100
"""Least number of updates between two changes of the number of people."""
WARMUP = 50
MIX = (2, 2, 2, 2, 3, 3, 4, 4, 5, 6, 8, 12, 2, 2, 3, 3)
"""People in each row, in turn, in lessons that begin with a mix: the rows' scenes never end."""
TOGETHER = 8
"""Updates that read on; then all rows begin anew, from an empty memory, as a user's text does. That is
harder, so most runs do so only when there are all people."""
NOT_SCORED = -100


def scene(random: random.Random, n_people: int) -> Iterator[tuple[str, bool]]:
    """Words without end about some people, each with True where the next word is an answer."""
    draw = random.random
    people = random.sample(NAMES, n_people)
    """In the order of their last moves, latest first."""
    places: dict[str, str] = {}
    while True:
        kind = draw()
        known = [name for name in people if name in places]
        if kind < FILLERS:
            yield from ((word, False) for word in FILLER.split())
        elif kind < FILLERS + QUESTIONS and known:
            # Half of the questions ask for people who moved lately, but anyone may be asked for again.
            at = int(len(known) ** draw()) - 1 if draw() < 0.5 else int(draw() * len(known))
            name = known[at]
            yield from [
                ("Where", False),
                ("is", False),
                (f"{name}?", True),
                (f"{places[name]}.", False),
            ]
        else:
            name = people.pop(int((len(people) + 1) ** draw()) - 1)
            people.insert(0, name)
            places[name] = random.choice(PLACES)
            yield from ((word, False) for word in (name, "is", "in", f"{places[name]}."))
        if draw() < LINES:
            yield "<eos>", False


class Scenes:
    """Rows of scenes, one after another, about at most ``people`` people; or one without end in each
    row, about as many people as ``mix`` says."""

    def __init__(self, words: list[str], n_rows: int, seed: int, mix: tuple[int, ...] = ()) -> None:
        self.people = max(mix, default=FEWEST)
        self._mix = mix
        self._ids = {word: i for i, word in enumerate(words)}
        self._random = [random.Random(seed * 1000 + row) for row in range(n_rows)]
        self.begin()

    def begin(self) -> None:
        """Begin a new scene in every row."""
        self._rows = [self._row(random, row) for row, random in enumerate(self._random)]
        self._last = [next(row) for row in self._rows]

    def _row(self, random: random.Random, row: int) -> Iterator[tuple[int, bool]]:
        if self._mix:
            for word, asks in scene(random, self._mix[row % len(self._mix)]):
                yield self._ids[word], asks
        while True:
            n_people = self.people if random.random() < 0.5 else random.randint(FEWEST, self.people)
            words = scene(random, n_people)
            for _ in range(random.randint(*SCENE)):
                word, asks = next(words)
                yield self._ids[word], asks

    def next(self, n_words: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The next words, and what comes after each: :data:`NOT_SCORED` but for answers, ``[B, T]``."""
        drawn = [
            [last, *(next(row) for _ in range(n_words))]
            for last, row in zip(self._last, self._rows, strict=True)
        ]
        self._last = [row[-1] for row in drawn]
        ids, asks = torch.tensor(drawn).unbind(-1)
        return ids[:, :-1], torch.where(asks[:, :-1] > 0, ids[:, 1:], NOT_SCORED)


def teach(
    run: Run,
    n_updates: int,
    learning_rate: float,
    good_enough: float,
    anew: bool,
    mixed: int,
) -> dict[str, Any]:
    """Train a run's model on scenes, in place.

    The learning rate is constant for half of the updates, then falls to a twentieth.

    Args:
        run: its options say how many rows of how many words an update reads.
        n_updates: number of updates.
        learning_rate: AdamW's.
        good_enough: mean loss of answers, in nats, below which there are more people.
        anew: let rows begin anew from the first update on, not only when there are all people.
        mixed: number of updates at first in which each row is always about the same people, from two
            in some rows to twelve in another (:data:`MIX`), and none begins anew.

    Returns:
        The most people in a scene, and the last loss.
    """
    options = run.config.train
    model = run.model
    torch.manual_seed(options.seed)
    words = run.tokenizer.words
    scenes = Scenes(words, options.batch_size, options.seed, MIX if mixed else ())
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.01, fused=True
    )
    memory: Any = None
    losses: deque[float] = deque(maxlen=SCORED)
    changed = 0
    model.train()
    for update in range(n_updates):
        if mixed and update == mixed:
            scenes = Scenes(words, options.batch_size, options.seed)
            scenes.people = len(NAMES)
            memory = None
        begins = update >= mixed and (anew or scenes.people == len(NAMES))
        if memory is None or (begins and update % TOGETHER == 0):
            scenes.begin()
            memory = model.initial_memory(options.batch_size)
        read, answers = scenes.next(options.segment_length)
        out = model(read, memory, targets=answers)
        memory = out.memory.detach()
        out.loss.backward()
        for group in model.clip_groups():
            torch.nn.utils.clip_grad_norm_(group, 1.0)
        share = min(1.0, (update + 1) / WARMUP, 2 * (1.025 - update / n_updates))
        optimizer.param_groups[0]["lr"] = learning_rate * share
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(out.losses.detach().sum() / out.n_scored.clamp(min=1)))
        loss = sum(losses) / len(losses)
        if loss < good_enough and update - changed > WAIT and scenes.people < len(NAMES):
            scenes.people = min(len(NAMES), scenes.people + (1 if scenes.people < 6 else 2))
            changed = update
        if (update + 1) % 500 == 0:
            print(
                f"lesson {update + 1:,} of {n_updates:,}: {scenes.people} people, loss {loss:.3f}"
            )
    model.eval()
    return {"people": scenes.people, "loss": round(loss, 4)}
