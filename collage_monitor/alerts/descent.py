"""Alerts on the descent: updates that do not arrive, in the model or in a layer, and steps off the oracle's."""

from __future__ import annotations

from typing import Final

from collage_monitor.alerts.definition import Condition, about_runs
from collage_monitor.strategies import STRATEGIES

__all__ = ["ALERTS"]

_GOOD = 0.9
"""From here on nearly all of the intended descent counts as arrived."""
_STOCHASTIC = "|".join(name for name, entry in STRATEGIES.items() if entry.stochastic)

ALERTS: Final = (
    about_runs(
        "CollageEdqDrop",
        # Of a run that was good: one that loses updates from its beginning is CollageEdqLow's.
        Condition("collage_edq_ratio", "<", 0.9, "share of quantile", quantile=0.9, quantile_from=_GOOD),
        window_seconds=3600.0,
        for_seconds=300.0,
        severity="warning",
        on_by_default=True,
        summary="the effective descent quality was good, and fell by more than a tenth within the hour",
        meaning=(
            "Less of the intended update reaches the weights than a short while ago. Either updates have become "
            "smaller than what the weights' format can hold, or a residual that carried them is gone."
        ),
        other_causes=(
            "the learning rate was lowered by its schedule: updates shrink, the gaps between weights do not",
            "the run resumed from a checkpoint that did not keep the residuals",
            "weights grew past a power of two, where the gap doubles",
        ),
        first_step=(
            "Open the run's layer × step heatmap of edq_ratio, sorted by worst. If all layers fell at once, "
            "suspect the schedule or a resume; if single layers did, the size of their weights. Then compare "
            "half_ulp_margin before and after."
        ),
    ),
    about_runs(
        "CollageEdqLow",
        Condition("collage_edq_ratio", "<", _GOOD),
        for_seconds=600.0,
        severity="warning",
        on_by_default=True,
        summary="less than nine tenths of the intended descent reaches the weights",
        meaning=(
            "Rounding takes more than a tenth of the descent. The run trains as if with a smaller learning rate, "
            "but not evenly: small updates are lost, large ones arrive."
        ),
        other_causes=(
            "a learning-rate warm-up longer than the alert's: early updates are small by intent",
            "few sampled elements: check whether the 95 % interval of edq_ratio reaches above 0.9",
        ),
        first_step=(
            "Look at lost_update_ratio and half_ulp_margin of the worst layers. If their updates are below half a "
            "gap, switch to a strategy that keeps more of the weights (split-master or master-weights) at the next "
            "checkpoint."
        ),
    ),
    about_runs(
        "CollageUpdatesLost",
        Condition("collage_lost_update_ratio", ">", 0.5, labels=(("strategy", "!~", _STOCHASTIC),)),
        for_seconds=600.0,
        severity="warning",
        summary="more than half of the intended updates are rounded away",
        meaning=(
            "More than half of the weights that should have moved in this step did not. Stochastic strategies "
            "are left out: their updates arrive on average, so the share of one step misjudges them. For those, "
            "look at lost_window_ratio over the longest window that is watched."
        ),
        other_causes=(
            'the optimizer rounds stochastically without saying so: pass strategy="stochastic" to watch',
            "most updates are tiny and a few large ones carry the descent: edq_ratio then stays near 1",
        ),
        first_step=(
            "Compare edq_ratio. If it is low too, the descent itself is lost: change the strategy. If it is near "
            "1, watch state_decrement_ratio and the oracle before you decide."
        ),
    ),
    about_runs(
        "CollageWindowUpdatesLost",
        Condition("collage_lost_window_ratio", ">", 0.5, "recent", labels=(("strategy", "=~", _STOCHASTIC),)),
        window_seconds=3600.0,
        for_seconds=600.0,
        severity="warning",
        summary="over a window of steps more than half of the weights do not move",
        meaning=(
            "Stochastic rounding brings updates to the weights in the mean. Over this window more than half of the "
            "weights that should have moved still stand: updates are too small for chance to bring them in time."
        ),
        other_causes=(
            "the window is short beside the gap over the update: watch a longer one",
            "the end of a learning-rate schedule: what is left to bring is small by intent",
        ),
        first_step=(
            "Compare edq_window_ratio of the same window: near 1 the descent arrives, and only its noise is large. "
            "If it is low too, keep more of the weights (light-stochastic or split-master)."
        ),
    ),
    about_runs(
        "CollageLayersStandStill",
        Condition(
            "collage_worst_layer_edq_ratio",
            "<",
            0.02,
            labels=(("worst", "=", "1"), ("strategy", "!~", _STOCHASTIC)),
        ),
        for_seconds=900.0,
        severity="warning",
        summary="a layer stands still: nothing of its intended updates arrives",
        meaning=(
            "At least one layer's updates are all below half a gap of its weights, so each is rounded away. The "
            "model's own number hides it: other layers carry nearly all of the descent."
        ),
        other_causes=(
            "normalisation weights near 1 under a small learning rate: they stand where the gap is widest",
            "a layer that is frozen in effect: its learning rate is next to nothing by intent",
        ),
        first_step=(
            "Ask for the worst layers by edq_ratio. Keep those in a wider format, raise their learning rate, or "
            "switch to a strategy with a residual."
        ),
    ),
    about_runs(
        "CollageOracleDrift",
        Condition("collage_edq_oracle_ratio", ">", 0.25, "distance", labels=(("strategy", "!~", _STOCHASTIC),)),
        for_seconds=1800.0,
        severity="warning",
        summary="steps differ by more than a quarter from those of an optimizer in fp64",
        meaning=(
            "The oracle keeps its own weights and states in fp64 from the same gradients. The run's steps are a "
            "quarter too small or too large beside its steps: an error has gathered in the optimizer's state."
        ),
        other_causes=(
            "the oracle attached in the middle of a run, and its states have not caught up",
            "weights that are written between steps: oracle_restarts counts how often it began anew",
        ),
        first_step=(
            "Read state_decrement_ratio and oracle_step_norm_ratio. If a state does not decay, keep it wider "
            "(plus, full or fp32-states)."
        ),
    ),
)
