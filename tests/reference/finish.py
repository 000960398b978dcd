"""Metrics of merged totals in exact rationals and 60-digit decimals, straight from the definitions."""

from decimal import Decimal, getcontext
from fractions import Fraction

getcontext().prec = 60


def exact(value):
    return Fraction(float(value))


def root(value):
    """√ of a rational as a Decimal."""
    return (Decimal(value.numerator) / Decimal(value.denominator)).sqrt()


def over(a, b):
    return None if b == 0 else Fraction(a) / Fraction(b)


def metrics(totals):
    """Metric → value (Fraction, Decimal, or None for undefined) of one point's totals."""
    t = {key: exact(value) for key, value in totals.items()}
    active = t["lost"] + t["distorted"] + t["faithful"]
    uu, ue, ee = (t[f"{name}_sum"] for name in ("intended_squared", "intended_effective", "effective_squared"))
    ee = max(ee - t["effective_squared_sum_without_u"], Fraction(0))
    steps = t["measured_steps"]
    step_norm = root(uu / steps)
    weight_norm = root(t["parameter_squared_sum"])
    return {
        "edq_ratio": over(ue, uu),
        "edq": None if uu == 0 else Decimal(ue.numerator) / Decimal(ue.denominator) / root(uu * steps),
        "edq_cosine": None
        if uu * ee == 0
        else Decimal(ue.numerator) / Decimal(ue.denominator) / (root(uu) * root(ee)),
        "update_error_ratio": None if uu == 0 else root(max(ee - 2 * ue + uu, Fraction(0)) / uu),
        "measured_ratio": over(active + t["idle"], t["elements"] - t["nonfinite"]),
        "edq_visible_ratio": over(t["intended_visible_sum"], uu),
        "lost_update_ratio": over(t["lost"], active),
        "lost_visible_ratio": over(t["lost_visible"], active),
        "unchanged_ratio": over(t["unchanged"], t["elements"] - t["nonfinite"]),
        "edq_oracle_ratio": over(t["oracle_effective_sum"], t["oracle_squared_sum"]),
        "oracle_displacement_ratio": over(
            t["oracle_displacement_effective_sum"], t["oracle_displacement_squared_sum"]
        ),
        "decay_ratio": over(t["decay_kept_sum"], t["decay_squared_sum"]),
        "residual_fill_ratio": over(t["residual_fill_sum"], t["residual_elements"]),
        "residual_zero_ratio": over(t["residual_zero"], t["residual_elements"]),
        "residual_dropped_ratio": over(t["residual_dropped"], t["residual_elements"]),
        "grad_norm": root(t["gradient_squared_sum"] / steps),
        "intended_norm": step_norm,
        "param_norm": weight_norm,
        "update_to_weight_ratio": None if weight_norm == 0 else step_norm / weight_norm,
    }
