"""Decoupled weight decay alone, as a rounded operation of its own: how much of it arrives."""

from __future__ import annotations

from collage_monitor.definitions import Definition, Metric, ratio, sums

__all__ = ["DEFINITION"]

DEFINITION = Definition(
    statistics=tuple(
        sums(
            "weight²",
            decay_squared_sum="Σ d² of decoupled decay alone, d = −lr·λ·θᵛ.",
            decay_kept_sum="Σ d·d̂, d̂ = RN(θᵛ·(1 − lr·λ)) − θᵛ in the parameter's dtype.",
        )
    ),
    metrics=(
        Metric(
            "decay_ratio",
            "Weight decay kept",
            "ratio",
            "Σ d·d̂ / Σ d²",
            "Share of decoupled weight decay that is kept as a rounded operation of its own, as torch makes it. "
            "Undefined for decay that is coupled or zero; a strategy that makes it part of its update keeps more.",
            needs=("decay_kept_sum", "decay_squared_sum"),
            finish=ratio,
            ideal=1.0,
        ),
    ),
)
