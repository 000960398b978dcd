"""How many weights move against their gradient: the totals that travel, and the metric that is made of them.

Momentum carries a weight on after its gradient has turned, and weight decay pulls it whatever the gradient says:
far below 1, steps follow the past more than the present batch. The agent, the server and the dashboard import this
file, so it needs no torch.
"""

from __future__ import annotations

from collage_monitor.definitions import Definition, Metric, ratio, sums

__all__ = ["DEFINITION"]

DEFINITION = Definition(
    statistics=tuple(
        sums(
            "elements",
            needs=("gradient",),
            sign_compared="Finite elements with g ≠ 0 and e ≠ 0.",
            sign_agreement="Those of them with e·g < 0: the weight moved against its gradient.",
        )
    ),
    metrics=(
        Metric(
            "sign_agreement_ratio",
            "Moved against the gradient",
            "ratio",
            "sign_agreement / sign_compared",
            "Share of the weights that moved, with a gradient, that moved against it: 1 for plain SGD.",
            needs=("sign_agreement", "sign_compared"),
            finish=ratio,
        ),
    ),
)
