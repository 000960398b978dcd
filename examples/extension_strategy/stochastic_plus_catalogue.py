"""What a dashboard or a report says of the strategy."""

from collage_monitor.definitions import Strategy

__all__ = ["ENTRY"]

ENTRY = Strategy(
    "stochastic-plus",
    title="Stochastic rounding, pair v",
    keeps="weights rounded stochastically, second moment as (v, δv)",
    bytes_per_parameter=10,
    stochastic=True,
)
