"""Numbers as people read them."""

import ast
import math
import re
from pathlib import Path
from typing import Any

import collage_dashboard
import msgspec
import pytest
from collage_dashboard.components import tags_of, text_of_tags
from collage_dashboard.descriptions import describe, in_few_words, interval, metric_choices, when
from collage_dashboard.pages.run_about import facts_of

from collage_monitor import wire
from collage_monitor.diagnosis import finite
from collage_monitor.number_text import count, number, value_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0"),
        (1.0, "1.000"),
        (0.999964, "1.000"),
        (0.84231, "0.8423"),
        (-0.5, "−0.5000"),
        (9999.6, "10,000"),
        (12345.6, "12,350"),
        (123.456, "123.5"),
        (0.0001234, "0.0001234"),
        (0.00001234, "1.234e−05"),
        (1.5e9, "1.500e+09"),
        ("NaN", "NaN"),
        ("Infinity", "∞"),
        (-math.inf, "−∞"),
    ],
)
def test_four_significant_digits(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("lost_update_ratio", 0.33216, "33.2 %"),
        ("lost_update_ratio", 0.0004, "0.04 %"),
        ("lost_update_ratio", 0.00003, "< 0.01 %"),
        ("lost_update_ratio", 0.99997, "> 99.99 %"),
        ("lost_update_ratio", 1.0, "100 %"),
        ("lost_update_ratio", None, "–"),
        ("decay_ratio", -0.25, "−25.0 %"),
        ("decay_ratio", 12.5, "1,250.0 %"),
        ("residual_dropped_ratio", "NaN", "NaN"),
        ("state_decrement_ratio/exp_avg_sq", 0.0004, "0.000"),
        ("edq_ratio", -0.98266, "−0.983"),
        ("edq_ratio", 0.0, "0"),
        ("edq_ratio", 123456.0, "123,500"),
        ("edq_noise_ratio", 0.00123, "0.001230"),
        ("half_ulp_margin", 9.0, "9 or more"),
        ("half_ulp_margin", 8.9, "8.900"),
        ("half_ulp_margin", -23.0, "−23 or less"),
        ("nonfinite_params", 1234.0, "1,234"),
        ("bytes_per_parameter", 12.0, "12"),
        ("bytes_per_parameter", 8.0271, "8.03"),
        ("loss", 3.48694, "3.487"),
        ("a name of one's own", 12345.6, "12,350"),
    ],
)
def test_a_metric_has_one_form_on_every_page(key, value, text):
    assert value_text(key, value) == text


FOR_MACHINES = {"view.py": {".15g", "g"}, "figures/heatmap.py": {".6g"}, "figures/style.py": {"g"}}
FOR_MACHINES |= {"figures/picture.py": {",.6g", ".1f", "g"}}
"""An address, what a figure is rounded to, a colour's opacity, and where the parts of a picture stand."""
WITHOUT_A_METRIC = {"pages/run_layers.py": {"g"}, "pages/incident_content.py": {".3g", ".0f"}}
"""Thresholds as they were set, and durations."""


@pytest.mark.slow
def test_only_one_module_formats_numbers():
    folder = Path(collage_dashboard.__file__).parent
    own = {}
    for path in folder.rglob("*.py"):
        name = path.relative_to(folder).as_posix()
        specs = {
            ast.unparse(node.format_spec)[2:-1]
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FormattedValue) and node.format_spec is not None
        }
        found = {spec for spec in specs if re.fullmatch(r".*[efg%]", spec)}
        found -= FOR_MACHINES.get(name, set()) | WITHOUT_A_METRIC.get(name, set())
        if found and name != "descriptions.py":
            own[name] = found
    assert not own, "collage_monitor.number_text has the forms: value_text, share_text, number"


def test_an_axis_says_its_unit_once():
    keys = ("validation_loss", "edq_ratio", "tokens_per_second", "lost_update_ratio")
    titles = [describe(key).axis_title for key in keys]
    assert titles == ["Validation loss", "EDQ (ratio)", "Tokens per second (tokens/s)", "Updates lost"]
    assert [describe(key).tick_suffix for key in keys] == ["", "", "", " %"]


def test_counts_are_grouped_intervals_have_both_ends_times_are_in_utc_and_memory_in_binary_units(server):
    assert [count(value) for value in (1234567.0, None, "NaN")] == ["1,234,567", "–", "NaN"]
    assert interval("edq_ratio", 0.8, 0.9) == "0.800 … 0.900"
    assert interval("lost_update_ratio", 0.0, 0.9) == "0 % … 90.0 %"
    assert interval("edq_ratio", None, 0.9) == ""
    assert [when(value) for value in (0.0, None)] == ["1970-01-01 00:00 UTC", "–"]
    assert [finite(value) for value in (None, "NaN", "Infinity", 0.5)] == [None, None, None, 0.5]
    logged = {"memory_bytes": wire.LoggedScalar(value=1536.0 * 2**20, step=7)}
    run = msgspec.structs.replace(server.client().run("run-plain"), scalars=logged)
    assert ("memory_bytes", "1,536 MiB at step 7") in facts_of(run)


TAGS = [["a", "lr 0.1, warm"], ['5" disk', '"', 'x, "y"'], ["<img src=x onerror=alert(1)>"], ["a\nb", "c"], []]


@pytest.mark.parametrize("tags", TAGS)
def test_tags_written_as_text_are_read_as_the_same_tags_and_without_commas_written_as_they_are(tags):
    assert tags_of(text_of_tags(tags)) == tags
    assert text_of_tags(["a b", "<c>"]) == "a b, <c>"
    assert tags_of("a,, b , a") == ["a", "b"]


def test_a_logged_name_that_begins_as_a_metric_does_is_a_scalar():
    assert describe("grad_norm/encoder").scalar
    assert not describe("state_decrement_ratio/exp_avg_sq").scalar
    assert not describe("grad_norm").scalar
    groups: Any = metric_choices({"edq_ratio", "grad_norm/encoder"}, {"grad_norm/encoder"})
    values = [[item["value"] for item in group["items"]] for group in groups]
    assert values == [["edq_ratio"], ["grad_norm/encoder"]]


def test_a_run_that_was_not_evaluated_says_so_and_others_are_told_by_their_overview():
    assert in_few_words(None) == "Not evaluated yet"
    said = wire.Overview(run_id="r", health="losing updates", short="loses 57.6 % of its updates")
    assert in_few_words(said) == "Loses 57.6 % of its updates"
    assert in_few_words(wire.Overview(run_id="r", short="exp_avg_sq is stuck")) == "exp_avg_sq is stuck"
