"""One call and single tokens stay equal in a long run, and no counter in the state wraps."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from statelaws.errors import RefusedError
from statelaws.floor import FACTOR, IdleBits, difference, exact, is_coarse, perturbed, rounding
from statelaws.protocol import Stateful
from statelaws.reading import called, device_of, given_text, reads
from statelaws.report import Finding, said
from statelaws.script import script
from statelaws.states import leaves_of

LONG_RUN = "long-run"
"""The name of the law."""
ROWS = 2
LEAST = 1000
"""Tokens that are read one by one if the time allows it at all."""
MOST = 100_000
"""Tokens that are read one by one if there is time."""
FAR = (33_000, 100_000)
"""Tokens after which states that do not grow are tried again: a counter of 16 bits ends at 32,767."""
SEGMENT = 250
FAR_SEGMENT = 500
PROBE = 8
SHARE = 15
"""The part of the budget that is spent on more than the least."""
STREAMS = 3
"""Streams with perturbed weights, which show how far rounding can lead."""
CHAOTIC = 1e-2
"""Where rounding leads further than that, in deviations, nothing more can be told."""


@dataclass
class _Drift:
    """The first place at which two readings differ by more than rounding explains."""

    tokens: int
    difference: float
    floor: float


@dataclass
class _Run:
    """A long run, and how far it went."""

    tokens: int = 0
    far: int = 0
    worst: float = 0.0
    floor: float = math.nan
    drift: _Drift | None = None
    wrapped: str = ""
    chaotic: bool = False
    stopped: str = ""
    """The error with which the model refused more tokens."""


def long_run(
    model: Stateful[Any], seed: int, bits: IdleBits, deadline: float, budget: float
) -> Finding:
    """Read a text in segments and one by one, as far as the time goes, and compare."""
    claims = model.claims
    if not claims.cuts:
        return Finding(LONG_RUN, "not-offered", "outputs depend on the cuts, by design")
    if is_coarse(model.module, bits):
        return Finding(LONG_RUN, "not-offered", "numbers of two bytes hide a drift: try float32")
    until = min(deadline, time.process_time() + budget / SHARE)
    run = _ran(model, seed, bits, until, deadline)
    if run.tokens < min(LEAST, SEGMENT):
        return Finding(LONG_RUN, "inconclusive", "the time was up")
    if run.wrapped:
        return Finding(LONG_RUN, "broken", run.wrapped)
    if run.drift is not None:
        for other in (1, 2):
            # A chance difference, as of a comparison that rounding decides, does not recur.
            again = _ran(model, seed + other, bits, until, deadline)
            if again.drift is None:
                detail = (
                    f"differs after {run.drift.tokens:,} tokens, and with other inputs does not"
                )
                return Finding(LONG_RUN, "inconclusive", detail)
        return _broken(model, seed, run.drift)
    detail = f"{run.tokens:,} tokens one by one"
    if run.far:
        detail += f", and again after {run.far:,}"
    if run.stopped:
        detail += f"; more are refused: {run.stopped}"
    if run.chaotic:
        detail += "; after more, the last place of the weights changes outputs too much"
        if run.tokens <= SEGMENT:
            return Finding(LONG_RUN, "inconclusive", detail)
    return Finding(LONG_RUN, "holds", detail, run.worst, run.floor)


def _ran(model: Stateful[Any], seed: int, bits: IdleBits, until: float, deadline: float) -> _Run:
    model.module.eval()
    with torch.no_grad():
        run = _Run()
        try:
            state = _near(model, seed, bits, until, deadline, run)
            if run.drift is None and model.claims.bounded and state is not None:
                # As much time again, for what needs no single steps.
                _far(model, seed, min(deadline, 2 * until - time.process_time() + 1), run, state)
        except Exception as error:
            # Many end somewhere, as tables and room made in advance do.
            if run.tokens < LEAST:
                raise
            run.stopped = said(error)
    return run


def _near(
    model: Stateful[Any], seed: int, bits: IdleBits, until: float, deadline: float, run: _Run
) -> Any:
    """Read segments in one call and one by one beside each other; returns the state after them."""
    read = reads(model)
    step = int(model.claims.cuts)
    one = called(model.start, ROWS)
    single = called(model.start, ROWS)
    others = [called(model.start, ROWS) for _ in range(STREAMS)]
    first = math.nan
    led = 0.0
    for part in _segments(model, seed):
        now = time.process_time()
        if now > deadline or (run.tokens >= LEAST and (now > until or not model.claims.bounded)):
            break
        y, one = read(part.clone(), one)
        outputs = []
        for piece in part.split(step, 1):
            output, single = read(piece.clone(), single)
            outputs.append(output)
        for i, other in enumerate(others):
            generator = torch.Generator().manual_seed(seed + i)
            with perturbed(model.module, generator, bits):
                z, others[i] = read(part.clone(), other)
            led = max(led, difference(y, z))
        within = exact(y)
        if math.isnan(within.deviation):
            raise RefusedError("its outputs are all the same, or not finite")
        run.tokens += part.shape[1]
        if run.tokens == part.shape[1]:
            first = max(led, rounding(y, bits)) / within.deviation
        floor = max(led / within.deviation, first * math.sqrt(run.tokens / part.shape[1]))
        apart = difference(y, torch.cat(outputs, 1)) / within.deviation
        if floor > CHAOTIC:
            run.chaotic = True
            run.tokens -= part.shape[1] * (run.tokens > part.shape[1])
            return None
        if not apart <= FACTOR * floor:
            run.drift = _Drift(run.tokens, apart, floor)
            return None
        run.worst = max(run.worst, apart)
        run.floor = floor
    return one


def _far(model: Stateful[Any], seed: int, until: float, run: _Run, state: Any) -> None:
    """Read on in long segments, and compare a few tokens in one call and one by one."""
    read = reads(model)
    tokens = run.tokens
    before = _counts(state)
    grew = [True] * len(before)
    for part in _segments(model, seed + 100, FAR_SEGMENT):
        if time.process_time() > until or run.far >= FAR[-1]:
            return
        y, state = read(part.clone(), state)
        tokens += part.shape[1]
        after = _counts(state)
        if len(after) == len(before):
            for i, (old, new) in enumerate(zip(before, after, strict=True)):
                if grew[i] and new < 0 <= old:
                    run.wrapped = f"a counter in its state is {new:,} after {tokens:,} tokens"
                    return
                grew[i] = grew[i] and new >= old
        before = after
        if run.far < FAR[0] <= tokens or run.far < FAR[1] <= tokens:
            run.far = tokens
            probe = part[:, : PROBE * int(model.claims.cuts)]
            apart = _probed(model, probe, state, exact(y).deviation)
            if apart > FACTOR * run.floor * math.sqrt(tokens / run.tokens):
                run.drift = _Drift(tokens, apart, run.floor)
                return


def _probed(model: Stateful[Any], probe: Tensor, state: Any, deviation: float) -> float:
    read = reads(model)
    single = called(model.copy, state)
    whole, _ = read(probe.clone(), called(model.copy, state))
    outputs = []
    for piece in probe.split(int(model.claims.cuts), 1):
        output, single = read(piece.clone(), single)
        outputs.append(output)
    return difference(whole, torch.cat(outputs, 1)) / deviation


def _segments(model: Stateful[Any], seed: int, length: int = SEGMENT) -> Iterator[Tensor]:
    """Inputs of a long run, at most :data:`MOST` tokens."""
    step = int(model.claims.cuts)
    length = -(-length // step) * step
    generator = torch.Generator().manual_seed(seed)
    for _ in range(-(-MOST // length)):
        yield model.inputs.draw(ROWS, length, generator).to(device_of(model))


def _counts(state: Any) -> list[int]:
    """Integers in a state that may count tokens: the largest of each tensor, and plain ones."""
    found = []
    for leaf in leaves_of(state):
        if isinstance(leaf, Tensor) and leaf.dtype in (torch.int8, torch.int16, torch.int32):
            found.append(int(leaf.max()) if leaf.numel() == 1 or leaf.unique().numel() == 1 else 0)
    return found


def _broken(model: Stateful[Any], seed: int, drift: _Drift) -> Finding:
    step = int(model.claims.cuts)
    length = -(-SEGMENT // step) * step
    detail = f"{ROWS} rows of {drift.tokens:,} tokens, in segments of {length} and {step} by {step}"
    text = None
    if drift.tokens <= LEAST:
        draw = model.inputs.code(ROWS, length)
        lines = [
            f"generator = torch.Generator().manual_seed({seed})",
            "",
            f"parts = [{draw} for _ in range({drift.tokens // length})]",
            f"s1 = start({ROWS})",
            f"s2 = start({ROWS})",
            "for part in parts:",
            f"    whole, s1 = read({given_text(model, 'part')}, s1)",
            "    single = []",
            f"    for piece in part.split({step}, 1):",
            f"        y, s2 = read({given_text(model, 'piece')}, s2)",
            "        single.append(y)",
        ]
        shown = "(whole - torch.cat(single, 1)).abs().max().item() / whole.std().item()"
        text = script(model, lines, shown, f"rounding explains {drift.floor:.0e}")
    return Finding(LONG_RUN, "broken", detail, drift.difference, drift.floor, text)
