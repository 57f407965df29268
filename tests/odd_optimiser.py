"""An optimiser that keeps all kinds of things, of which the next step depends on each."""

from __future__ import annotations

from typing import Any

import torch


class Odd(torch.optim.Optimizer):
    """It counts in its groups, too, and draws random numbers."""

    def __init__(self, groups: list[dict[str, Any]], noise: float = 1e-3) -> None:
        super().__init__(groups, {"lr": 1.0, "noise": noise, "steps": 0, "scale": 1.0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            group["scale"] *= 0.9
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)

    def update(
        self, p: torch.Tensor, gradient: torch.Tensor, state: Any, group: dict[str, Any]
    ) -> None:
        if not state:
            rows = torch.zeros_like(gradient[..., :1]) if p.dim() > 1 else torch.zeros_like(p)
            state |= {"count": 0, "size": 0.5, "is_odd": False, "unused": None, "rows": rows}
            state["mean"] = torch.zeros_like(p, dtype=torch.bfloat16)
        # Of Python's own types, as they were.
        assert [type(state[key]) for key in ("count", "size", "is_odd")] == [int, float, bool]
        state["count"] += 1
        state["size"] = 0.9 * state["size"] + 0.1 * group["scale"] / group["steps"]
        state["is_odd"] = not state["is_odd"]
        state["rows"].lerp_(gradient.mean(-1, keepdim=True) if p.dim() > 1 else gradient, 0.5)
        state["mean"].lerp_(gradient.bfloat16(), 0.1)
        step = state["mean"].float() + state["rows"] + state["size"] * gradient
        step = step * (1 + state["is_odd"]) / state["count"]
        if group["noise"]:
            step = step + group["noise"] * torch.randn_like(step)
        p.add_(step, alpha=-group["lr"])
