"""How far a measurement, a report and a question travel through the code: ceilings that only ever fall."""

import pytest

from tests.paths import PAGE, PATHS, page_with, statements_of, traced

FILES_AND_CALLS = {"measured step": (26, 390), "report": (18, 182), "heatmap": (29, 523)}
"""Files entered and calls made: a path that becomes shorter lowers its ceiling."""
STATEMENTS = {
    "run": 6,
    "heatmap": 11,
    "series": 10,
    "compare": 18,
    "latest": 9,
    "worst": 9,
    "metrics": 5,
    "overview": 24,
}
"""SQL statements of a question about one run, a second after its last report."""


@pytest.fixture(scope="module")
def traces():
    return {name: traced(name) for name in PATHS}


@pytest.fixture(scope="module")
def lengths(traces):
    return {name: (len(trace.files), len(trace.calls)) for name, trace in traces.items()}


@pytest.mark.parametrize("path", PATHS)
def test_a_path_enters_no_more_files_and_makes_no_more_calls_and_ceilings_are_not_loose(path, lengths):
    files, calls = lengths[path]
    most_files, most_calls = FILES_AND_CALLS[path]
    assert most_files - 1 <= files <= most_files, f"{path} enters {files} files: lower its ceiling"
    assert 0.9 * most_calls <= calls <= most_calls, f"{path} makes {calls} calls: lower its ceiling"


def test_the_architecture_page_shows_them(traces):
    assert PAGE.read_text(encoding="utf-8") == page_with(traces), "run python -m tests.paths"


def test_a_question_takes_so_many_statements(tmp_path):
    assert statements_of(tmp_path) == STATEMENTS
