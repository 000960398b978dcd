"""The summary's shape: names, null for what is undefined, and a table that shows it as a dash."""

import json

from collage_demo.command import result_row, summary_json, summary_table
from collage_demo.pool import line_of
from collage_demo.recipe import Plan
from collage_demo.worker import FinalLine, ProgressLine

from collage_monitor import wire
from tests.dashboard.figures.answers import series

NAMES = {"strategy", "dtype", "steps", "train_loss", "validation_loss", "edq_ratio", "edq_oracle_ratio"}
NAMES |= {"oracle_displacement_ratio", "state_decrement_ratio", "lost_update_ratio", "bytes_per_parameter"}
NAMES |= {"tokens_per_cpu_second", "agent_overhead_ratio", "reports_sent", "reports_stored"}


def compared(**merged):
    return wire.ComparedRun(
        run_id="r",
        name="n",
        strategy="plus",
        dtype="bfloat16",
        state="finished",
        last_step=40,
        reports=7,
        series=series([]),
        merged=merged,
        scalars={"validation_loss": wire.LoggedScalar(step=40, value=2.5)},
        mean_scalars={"loss": "NaN"},
    )


def test_every_name_is_there_and_undefined_is_null():
    done = FinalLine("r", 40, 1000.0, 7, 0)
    line = result_row(Plan("plus", "bfloat16"), done, compared(edq_ratio=1.0, edq_oracle_ratio=None))
    (found,) = json.loads(summary_json([line]))
    assert set(found) == NAMES | {"run_id"}
    assert (found["validation_loss"], found["edq_ratio"], found["steps"]) == (2.5, 1.0, 40)
    assert found["train_loss"] is found["edq_oracle_ratio"] is found["state_decrement_ratio"] is None
    assert found["reports_sent"] == found["reports_stored"] == 7
    header, row = summary_table([line]).splitlines()
    assert len(header) == len(row)
    assert row.split() == ["plus", "bfloat16", "-", "2.5000", "1.000", "-", "-", "-", "-", "1000", "-", "7"]


def test_a_line_that_someone_else_printed_is_none():
    assert line_of("warning: something\n", FinalLine) is None
    step = '{"type":"step","step":1,"loss":2.0,"validation_loss":3.0}'
    assert line_of(step, FinalLine) == ProgressLine(1, 2.0, 3.0)
