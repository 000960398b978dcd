"""Checksums of replicated weights, for the server to compare. No metric is made of them."""

from __future__ import annotations

from collage_monitor.definitions import Definition, Statistic

__all__ = ["DEFINITION"]

DEFINITION = Definition(
    statistics=(
        Statistic(
            "replica_checksum",
            "sum",
            "last",
            "1",
            "Of the sampled weights' bits after the step, below 2³² a tensor: raw, equal in replicas.",
            raw=True,
        ),
        Statistic(
            "replica_checksum_elements", "sum", "last", "elements", "Elements that it was made of: raw.", raw=True
        ),
    )
)
