"""The oracle: this run against an fp64 optimizer with weights and states of its own, fed the same gradients."""

from __future__ import annotations

from collage_monitor.definitions import Definition, Interval, Metric, Statistic, as_is, ratio, root_ratio, sums

__all__ = ["DEFINITION"]


def _since_attach(name: str, text: str) -> Statistic:
    return Statistic(name, "sum", "last", "weight²", text, needs=("intended",))


DEFINITION = Definition(
    statistics=(
        Statistic("oracle_steps", "max", "last", "steps", "Steps since the oracle was attached.", raw=True),
        *sums(
            "elements",
            raw=True,
            oracle_sampled="Elements that the oracle follows: raw.",
            oracle_elements="Elements that they stand for.",
        ),
        Statistic("oracle_active_blocks", "sum", "max", "blocks", "Oracle blocks with some o ≠ 0: raw.", raw=True),
        *sums(
            "weight²",
            needs=("intended",),
            oracle_squared_sum="Σ o²",
            oracle_effective_sum="Σ o·e, on the oracle's sample.",
            oracle_intended_squared_sum="Σ u², on the oracle's sample.",
        ),
        _since_attach("oracle_displacement_squared_sum", "Σ O², since attach."),
        _since_attach("oracle_displacement_effective_sum", "Σ O·E, since attach."),
        _since_attach("oracle_drift_squared_sum", "Σ (E − O)², since attach."),
    ),
    metrics=(
        Metric(
            "edq_oracle_ratio",
            "EDQ against the oracle",
            "ratio",
            "Σ o·e / Σ o²",
            "This step against an fp64 optimizer that has kept its own weights and states since attach. "
            "Judge |1 − x|.",
            needs=("oracle_effective_sum", "oracle_squared_sum"),
            finish=ratio,
            ideal=1.0,
            interval=Interval(
                "oracle_effective_sum",
                "oracle_squared_sum",
                sample=("oracle_sampled", "oracle_elements", "oracle_active_blocks"),
            ),
            exposed=True,
        ),
        Metric(
            "oracle_step_norm_ratio",
            "Step size against the oracle",
            "ratio",
            "√(Σ u² / Σ o²)",
            "Above 1 the steps are too large, below 1 too small.",
            needs=("oracle_intended_squared_sum", "oracle_squared_sum"),
            finish=root_ratio,
            ideal=1.0,
        ),
        Metric(
            "oracle_displacement_ratio",
            "Displacement against the oracle",
            "ratio",
            "Σ O·E / Σ O²",
            "How far the weights have come since attach, along the oracle's way. "
            "Compare at equal oracle_steps only.",
            needs=("oracle_displacement_effective_sum", "oracle_displacement_squared_sum"),
            finish=ratio,
            ideal=1.0,
        ),
        Metric(
            "oracle_drift_ratio",
            "Drift from the oracle",
            "ratio",
            "√(Σ (E − O)² / Σ O²)",
            "Distance from where the oracle stands, in units of its displacement.",
            needs=("oracle_drift_squared_sum", "oracle_displacement_squared_sum"),
            finish=root_ratio,
            ideal=0.0,
        ),
        Metric(
            "oracle_steps",
            "Oracle steps",
            "steps",
            "oracle_steps",
            "Steps since the oracle was attached.",
            needs=("oracle_steps",),
            finish=as_is,
        ),
    ),
)
