"""How far a measurement, a report and a question travel through the code: counts that only ever fall."""

import pytest

from tests.paths import PAGE, PATHS, assert_calls, page_with, statements_of, traced

FILES_AND_CALLS = {"measured step": (25, 387), "worker": (15, 787), "report": (20, 182), "heatmap": (31, 523)}
"""Files entered, exactly, and calls made, as recorded."""
STATEMENTS = {"run": 5, "heatmap": 11, "series": 10, "compare": 15}
STATEMENTS |= {"latest": 8, "worst": 9, "metrics": 6, "overview": 17}
"""SQL statements of a question about one run, a second after its last report."""


@pytest.fixture(scope="module")
def traces():
    return {name: traced(name) for name in PATHS}


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_a_path_enters_so_many_files_and_makes_about_so_many_calls(path, traces):
    files, calls = FILES_AND_CALLS[path]
    assert len(traces[path].files) == files
    assert_calls(traces[path].files, calls)


@pytest.mark.slow
def test_the_architecture_page_shows_them(traces):
    assert PAGE.read_text(encoding="utf-8") == page_with(traces), "run python -m tests.paths"


@pytest.mark.slow
def test_a_question_takes_so_many_statements(tmp_path):
    assert statements_of(tmp_path) == STATEMENTS
