"""Advice for parameters of a checkpoint that keep too little of their weights or states.

`collage_monitor.diagnosis.advice` makes the choice and the words; this module describes the training, as far as a
checkpoint shows it. `findings.py`, `checkpoint_audit.py` and `cure.py` call it, so that all three give one advice
(`tests/audit/test_cure.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from collage_optim.names import dtype_name
from collage_optim.state_loading import OF_WRAPPERS

from collage_agent.audit.checkpoint_parameters import SECOND_MOMENTS, CheckpointParameter
from collage_monitor import wire
from collage_monitor.diagnosis import Lacking, advice_for

__all__ = ["advice_about", "advised"]

_RULES: Final = {"CollageAdamW": "AdamW", "CollageAdam": "Adam", "CollageLion": "Lion", "CollageSGD": "SGD"}


def advised(parameters: Sequence[CheckpointParameter], lacking: Lacking, otherwise: str) -> str:
    """Advice for parameters that keep too little of their weights or states; `otherwise` if nothing fits.

    A checkpoint names options and states, not the optimizer: the rule is that which has these.
    """
    found = advice_about(parameters, lacking)
    if found is None:
        return otherwise
    fitting = _fitting(parameters[0])
    return found.text if fitting is None else f"if this is {_RULES[fitting]}, {found.text}"


def advice_about(
    parameters: Sequence[CheckpointParameter], lacking: Lacking, *, strategy: str | None = None
) -> wire.Advice | None:
    """Advice for parameters that keep too little; None if nothing fits.

    strategy: the true storage, if it differs from the apparent one.
    """
    if not parameters:
        return None
    first, dtypes, states, weights = parameters[0], Counter[str](), 0, 0
    for entry in parameters:
        kept = entry.weight if entry.weight is not None else next(iter(entry.averages.values()))
        dtypes[dtype_name(kept.dtype)] += entry.elements
        weights += 8 * entry.elements
        states += sum(
            state.numel() * (4 if state.dtype == kept.dtype else state.dtype.itemsize)
            for state in entry.averages.values()
        )
    seconds = sum(name in SECOND_MOMENTS for name in first.averages)
    seen = strategy or first.strategy
    return advice_for(
        wire.Trained(
            optimizer="this rule",
            strategy="light" if seen == "light or kahan" else seen,
            fitting=_fitting(first),
            first_moments=len(first.averages) - seconds,
            second_moments=seconds,
            betas=[float(beta) for beta in first.group.get("betas", ())],
            parameters=dict(dtypes),
            float32_bytes=(weights + states) / max(dtypes.total(), 1),
        ),
        lacking,
    )


def _fitting(entry: CheckpointParameter) -> str | None:
    """The class of ours whose rule has these options and keeps these averages."""
    averages, group = {*entry.averages} - {*OF_WRAPPERS}, entry.group
    if {"exp_avg", "exp_avg_sq"} <= averages <= {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"} and "eps" in group:
        coupled = group.get("decoupled_weight_decay") is False
        return None if "momentum_decay" in group else "CollageAdam" if coupled else "CollageAdamW"
    if averages == {"exp_avg"} and len(group.get("betas", ())) == 2 and "eps" not in group:
        return "CollageLion"
    return "CollageSGD" if averages <= {"momentum_buffer"} and "dampening" in group else None
