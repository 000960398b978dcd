"""The catalogue of statistics: every estimated total that travels, and how it merges over shards and over steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["HISTOGRAM_LABELS", "HISTOGRAM_OCTAVES", "OverShards", "OverSteps", "STATISTICS", "Statistic"]

OverShards = Literal["sum", "max", "min"]
OverSteps = Literal["sum", "last", "max", "min", "root_sum"]

HISTOGRAM_OCTAVES: Final = tuple(range(-24, 8))
"""Octave k holds |u| / gap in [2**k, 2**(k+1))."""
HISTOGRAM_LABELS: Final = ("underflow", *(str(octave) for octave in HISTOGRAM_OCTAVES), "overflow")


@dataclass(frozen=True)
class Statistic:
    """One estimated total: what it is and how it merges. `label` names what stands behind the slash of its key."""

    name: str
    over_shards: OverShards
    over_steps: OverSteps
    unit: str
    help: str
    label: str | None = None


def _sum(name: str, unit: str, text: str, label: str | None = None) -> Statistic:
    return Statistic(name, "sum", "sum", unit, text, label)


def _window(name: str, unit: str, text: str) -> Statistic:
    return Statistic(name, "sum", "last", unit, text, "steps")


_STATISTICS = (
    Statistic("measured_steps", "max", "sum", "steps", "Measured steps merged into the totals."),
    _sum("elements", "elements", "Elements of the tensor shard."),
    _sum("sampled", "elements", "Elements really looked at: raw, never scaled up."),
    Statistic("active_blocks", "sum", "max", "blocks", "Sampled blocks with some u ≠ 0: raw, never scaled up."),
    _sum("nonfinite", "elements", "θ, g, u or e not finite; left out of every sum and ratio."),
    _sum("idle", "elements", "u = 0: nothing was intended."),
    _sum("stray", "elements", "Idle elements with e ≠ 0."),
    _sum("lost", "elements", "u ≠ 0 and e = 0: rounded away."),
    _sum("distorted", "elements", "u ≠ 0, e ≠ 0 and |e − u| > ½|u|."),
    _sum("reversed", "elements", "Distorted elements with e·u < 0."),
    _sum("faithful", "elements", "u ≠ 0, e ≠ 0 and |e − u| ≤ ½|u|."),
    _sum("lost_visible", "elements", "u ≠ 0 and eᵛ = 0: the registered parameter did not move."),
    _sum("unchanged", "elements", "Finite elements with eᵛ = 0, idle ones included."),
    _sum("intended_squared_sum", "weight²", "Σ u²"),
    _sum("intended_effective_sum", "weight²", "Σ u·e"),
    _sum("effective_squared_sum", "weight²", "Σ e²"),
    _sum("intended_visible_sum", "weight²", "Σ u·eᵛ"),
    _sum("visible_squared_sum", "weight²", "Σ eᵛ²"),
    _sum("gradient_squared_sum", "gradient²", "Σ g²"),
    Statistic("parameter_squared_sum", "sum", "last", "weight²", "Σ θ² before the step."),
    _sum("nonfinite_gradients", "elements", "Elements whose gradient is not finite."),
    Statistic("nonfinite_parameters", "sum", "max", "elements", "Elements whose weight is not finite."),
    _sum("update_ulp_histogram", "elements", "Non-idle elements by |u| / gap, in octaves.", "octave"),
    _sum(
        "state_decrement_observed_sum",
        "state",
        "Σ (|s after| − |s before|) as stored, over elements whose |s| should shrink.",
        "state",
    ),
    _sum("state_decrement_intended_sum", "state", "The same sum in exact arithmetic.", "state"),
    _sum("state_zero", "elements", "Elements with g ≠ 0 whose state is 0 after the step.", "state"),
    _sum("gradient_nonzero", "elements", "Finite elements with g ≠ 0."),
    _sum("decay_squared_sum", "weight²", "Σ d² of decoupled decay alone, d = −lr·λ·θᵛ."),
    _sum("decay_kept_sum", "weight²", "Σ d·d̂, d̂ = RN(θᵛ·(1 − lr·λ)) − θᵛ in the parameter's dtype."),
    Statistic("residual_elements", "sum", "last", "elements", "Elements with a finite residual r, θ = θᵛ + r."),
    Statistic("residual_zero", "sum", "last", "elements", "Elements whose residual is 0 before the step."),
    Statistic("residual_nonfinite", "sum", "last", "elements", "Residuals that are NaN or infinite."),
    Statistic("residual_fill_sum", "sum", "last", "1", "Σ |r| / ½gap(θᵛ)"),
    Statistic(
        "residual_fill_histogram",
        "sum",
        "last",
        "elements",
        "Elements with r ≠ 0 by |r| / ½gap(θᵛ), the gap in r's direction, in octaves.",
        "octave",
    ),
    Statistic(
        "variance_numerator",
        "sum",
        "root_sum",
        "metric's²",
        "Variance of a ratio's estimated numerator.",
        "metric",
    ),
    Statistic(
        "variance_denominator",
        "sum",
        "root_sum",
        "metric's²",
        "Variance of its estimated denominator.",
        "metric",
    ),
    _sum("covariance", "metric's²", "Covariance of the two.", "metric"),
    _sum("variance_product_root", "metric's²", "√(V_AA·V_BB) of each step, made after shards merged.", "metric"),
    _sum("counterfactual_squared_sum", "weight²", "Σ u², of the steps with counterfactuals."),
    _sum(
        "counterfactual_kept_sum",
        "weight²",
        "Σ u·e, where e is what this method would have made of the step.",
        "method/dtype",
    ),
    _sum(
        "counterfactual_variance_sum",
        "weight²",
        "Σ Var(e), of methods that round at random.",
        "method/dtype",
    ),
    _window("window_intended_squared_sum", "weight²", "Σ U², U = Σ u over the window's steps."),
    _window("window_intended_effective_sum", "weight²", "Σ U·E, E = θ now − θ at the window's start."),
    _window("window_effective_squared_sum", "weight²", "Σ E²"),
    _window("window_intended_visible_sum", "weight²", "Σ U·Eᵛ"),
    _window("window_visible_squared_sum", "weight²", "Σ Eᵛ²"),
    _window("window_active", "elements", "Elements with U ≠ 0."),
    _window("window_lost", "elements", "U ≠ 0 and E = 0."),
    _window("window_lost_visible", "elements", "U ≠ 0 and Eᵛ = 0."),
    Statistic("oracle_steps", "max", "last", "steps", "Steps since the oracle was attached."),
    _sum("oracle_sampled", "elements", "Elements that the oracle follows: raw."),
    _sum("oracle_elements", "elements", "Elements that they stand for."),
    Statistic("oracle_active_blocks", "sum", "max", "blocks", "Oracle blocks with some o ≠ 0: raw."),
    _sum("oracle_squared_sum", "weight²", "Σ o²"),
    _sum("oracle_effective_sum", "weight²", "Σ o·e, on the oracle's sample."),
    _sum("oracle_intended_squared_sum", "weight²", "Σ u², on the oracle's sample."),
    Statistic("oracle_displacement_squared_sum", "sum", "last", "weight²", "Σ O², since attach."),
    Statistic("oracle_displacement_effective_sum", "sum", "last", "weight²", "Σ O·E, since attach."),
    Statistic("oracle_drift_squared_sum", "sum", "last", "weight²", "Σ (E − O)², since attach."),
    Statistic(
        "replica_checksum",
        "sum",
        "last",
        "1",
        "Of the sampled weights' bits after the step, below 2³² a tensor: raw, equal in replicas.",
    ),
    Statistic("replica_checksum_elements", "sum", "last", "elements", "Elements that it was made of: raw."),
)
STATISTICS: Final = {entry.name: entry for entry in _STATISTICS}
