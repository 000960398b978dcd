"""Averages that decay differently from the group's betas: an error that a clone of the optimizer shares.

If a step rounds or truncates β (0.999 in bfloat16 is 0.996 or 1), the clone does, too, and its states agree with
the wrong ones. For Adam's family the rule is known, so u uses the betas of the group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.intent.optimizer_clone import isolated
from collage_agent.intent.probe_runs import HOST, ProbeRun
from collage_agent.intent.selftest import SelfTestResult
from collage_agent.intent.shadow import Shadow
from collage_agent.intent.widening import Widening

__all__ = ["ShadowByBetas", "decays_otherwise"]

_AVERAGES: Final = {"exp_avg": 1, "exp_avg_sq": 2}
"""Adam's averages, and the power of the gradient that each is of."""
_LOOKS: Final = (4, 24)
"""Steps at which a step is looked at: a β that is corrected for the step count is another at each."""
_ALIKE: Final = 1e-9
_OFF: Final = 0.05
"""Of 1 − β: an average that is so much off is 1.05 times too slow or too fast."""


class ShadowByBetas(Shadow):
    """A shadow whose averages use the group's betas, not those of its own step."""

    as_taken = Shadow.displacement
    """The same with the averages as the step makes them."""

    def displacement(
        self, group: dict[str, Any], state: dict[str, Any], parameter: Tensor, gradient: Tensor, out: Tensor
    ) -> bool:
        before = {name: state[name].clone() for name in _AVERAGES if name in state}
        known = self.as_taken(group, state, parameter, gradient, out)
        for (name, power), beta in zip(_AVERAGES.items(), group["betas"], strict=True):
            if name in before:
                state[name] = before[name].mul_(float(beta)).add_(gradient**power, alpha=1 - float(beta))
        return known


def decays_otherwise(optimizer: Optimizer, group: Mapping[str, Any], found: SelfTestResult) -> bool:
    """Whether the states are Adam's, and one of them decays by another β than the group's, at each step alike.

    Steps a probe 24 times on the host. A β that depends on the step is a rule of its own, which is not judged.
    """
    betas: Any = group.get("betas")
    if found.kind != "shadow" or type(optimizer).__module__.startswith("torch.optim") or not _are_two(betas):
        return False
    try:
        with isolated(HOST):
            seen = [_betas_of(optimizer, dict(group), found, step) for step in _LOOKS]
    except Exception:
        return False
    early, late = seen
    if early is None or late is None or any(abs(a - b) > _ALIKE for a, b in zip(early, late, strict=True)):
        return False
    off = [abs((1 - own) / (1 - float(said)) - 1) for own, said in zip(late, betas, strict=True)]
    return off[0] < 1 and max(off) > _OFF


def _are_two(betas: object) -> bool:
    return (
        isinstance(betas, tuple | list)
        and len(betas) == 2
        and all(isinstance(beta, float | int | Tensor) and 0 < float(beta) < 1 for beta in betas)
    )


def _betas_of(
    optimizer: Optimizer, group: dict[str, Any], found: SelfTestResult, step: int
) -> tuple[float, float] | None:
    """The β of both averages at this step of a probe, if they are s ← βs + cg^k; None: they are not."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(64, generator=generator, dtype=torch.float64)
    run = ProbeRun(optimizer, group, [start], Widening() if found.widens else None, found.composition)
    before: dict[str, Tensor] = {}
    gradient = start
    for _ in range(step):
        before = {key: value.clone() for key, value in run.state(0).items() if key in _AVERAGES}
        gradient = torch.randn(64, generator=generator, dtype=torch.float64)
        run.step([gradient])
    after, known = run.state(0), list[float]()
    if before.keys() != _AVERAGES.keys():
        return None
    for name, power in _AVERAGES.items():
        # Two numbers explain 64 changes, or the average is something else.
        terms = torch.stack((before[name], gradient**power), 1)
        solved = torch.linalg.lstsq(terms, after[name].unsqueeze(1)).solution
        if not torch.allclose(terms @ solved, after[name].unsqueeze(1), rtol=1e-7, atol=1e-12):
            return None
        known.append(float(solved[0]))
    return known[0], known[1]
