"""The demo's result: a line for each training, as a table and as summary.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from collage_monitor import wire
from collage_studies.recipe import Plan
from collage_studies.worker import Done

__all__ = ["Line", "as_json", "as_table", "line"]


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A training's result. Ratios are of the whole model, all measured steps merged; None means undefined."""

    run_id: str
    strategy: str
    dtype: str
    steps: int
    train_loss: float | None
    validation_loss: float | None
    edq_ratio: float | None
    edq_oracle_ratio: float | None
    oracle_displacement_ratio: float | None
    state_decrement_ratio: float | None
    lost_update_ratio: float | None
    bytes_per_parameter: float | None
    tokens_per_cpu_second: float
    agent_overhead_ratio: float | None
    reports_sent: int
    reports_stored: int


def line(plan: Plan, done: Done, compared: wire.ComparedRun) -> Line:
    """A training's line, from what its process printed and what the server stored."""
    last = {name: logged.value for name, logged in compared.scalars.items()}
    return Line(
        run_id=done.run_id,
        strategy=plan.strategy,
        dtype=plan.dtype,
        steps=done.steps,
        train_loss=_number(compared.mean_scalars, "loss"),
        validation_loss=_number(last, "validation_loss"),
        edq_ratio=_number(compared.merged, "edq_ratio"),
        edq_oracle_ratio=_number(compared.merged, "edq_oracle_ratio"),
        oracle_displacement_ratio=_number(compared.merged, "oracle_displacement_ratio"),
        state_decrement_ratio=_number(compared.merged, "state_decrement_ratio/exp_avg_sq"),
        lost_update_ratio=_number(compared.merged, "lost_update_ratio"),
        bytes_per_parameter=_number(last, "bytes_per_parameter"),
        tokens_per_cpu_second=done.tokens_per_cpu_second,
        agent_overhead_ratio=_number(last, "agent_overhead_ratio"),
        reports_sent=done.reports_sent,
        reports_stored=compared.reports,
    )


def as_json(lines: Sequence[Line]) -> bytes:
    """The lines as a JSON list; undefined numbers are null."""
    return msgspec.json.format(msgspec.json.encode(lines), indent=2) + b"\n"


def as_table(lines: Sequence[Line]) -> str:
    """The lines as a table for the terminal."""
    head = f"{'strategy':<17}{'dtype':<10}{'train':>8}{'valid.':>8}{'EDQ':>8}{'oracle':>8}{'decay':>8}{'lost':>8}"
    rows = [head + f"{'B/param':>9}{'tok/s':>8}{'agent':>8}{'reports':>9}"]
    for entry in lines:
        cells = (
            (entry.train_loss, 8, ".4f"),
            (entry.validation_loss, 8, ".4f"),
            (entry.edq_ratio, 8, ".3f"),
            (entry.edq_oracle_ratio, 8, ".3f"),
            (entry.state_decrement_ratio, 8, ".3f"),
            (entry.lost_update_ratio, 8, ".3f"),
            (entry.bytes_per_parameter, 9, ".2f"),
            (entry.tokens_per_cpu_second, 8, ".0f"),
            (entry.agent_overhead_ratio, 8, ".2%"),
        )
        text = "".join(f"{'-' if value is None else format(value, form):>{width}}" for value, width, form in cells)
        rows.append(f"{entry.strategy:<17}{entry.dtype:<10}{text}{entry.reports_stored:>9}")
    return "\n".join(rows)


def _number(values: Mapping[str, wire.Number | None], name: str) -> float | None:
    value = values.get(name)
    return value if isinstance(value, float) else None
