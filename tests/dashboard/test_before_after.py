"""What changed at a step that a reader picks: the incident's table, divided where the reader says."""

import pytest
from collage_dashboard.pages.run_content import draw
from collage_dashboard.view import read_address

from tests.dashboard.asking import answered, question
from tests.dashboard.generated import raised_run
from tests.dashboard.walk import by_id, components, text

RAISED = raised_run(2000)


@pytest.fixture(autouse=True)
def raised(server):
    server.runs["run-raised"] = RAISED


def changed(page):
    """The card of what changed: its title, what divides its columns, and the rows that changed."""
    card = by_id(page, "run-change")
    table = next(part for part in components(card) if type(part).__name__ == "Table")
    rows = [part.children for part in components(table) if type(part).__name__ == "TableTr"]
    heads, *said = [[text(cell) for cell in row] for row in rows]
    return text(card), heads, said


@pytest.mark.parametrize(
    ("search", "title", "before", "after"),
    [
        ("?at=800", "What changed at step 800", "Before, steps 640 to 790", "After, steps 800 to 950"),
        ("?at=800-899", "What changed in steps 800 to 899", "Before, steps 700 to 799", "After, steps 800 to 899"),
    ],
)
def test_the_page_of_a_link_says_what_changed_at_its_steps(shown, search, title, before, after):
    said, heads, rows = changed(shown(f"/run/run-raised{search}"))
    assert title in said
    assert heads[1:3] == [before, after]
    assert rows == [["Learning rate", "0.0002000", "0.0006000", "× 3.00"]]
    assert "that hardly changed" in said


@pytest.mark.parametrize(
    ("search", "words"),
    [
        ("?at=1200", "No reported value changed by more than 10 %."),
        ("?at=1", "Before: no step"),
        ("?at=5000-6000", "After: no step"),
    ],
)
def test_where_nothing_changed_or_a_side_has_no_steps_it_says_so(shown, search, words):
    assert words in changed(shown(f"/run/run-raised{search}"))[0]


def test_without_a_picked_step_nothing_stands_there(shown):
    assert text(by_id(shown("/run/run-raised"), "run-change")) == ""


def test_the_curves_mark_what_is_picked(reader):
    view = read_address("/run/run-raised", "?at=800-900")
    drawn = draw("first", "loss", view, reader)
    assert sorted({shape.x0 for shape in drawn.layout.shapes if shape.yref == "y domain"}) == [800, 900]


def test_what_changed_is_told_anew_for_other_steps_and_for_new_points_only(http, server, shown):
    page = shown("/run/run-raised")
    revision = by_id(page, "run-revision").data

    def tell(at, told, reported=0):
        asked = {"pathname": "/run/run-raised", "search": f"?at={at}" if at else "", "zooms": 0}
        now = {**revision, "at": f"{revision['at']} {reported}"}
        inputs = [("run-shown", "data", asked), ("run-revision", "data", now)]
        outputs = [("run-change", "children"), ("run-change-told", "data")]
        return answered(http, question(outputs, inputs, [("run-change-told", "data", told)]))

    told = by_id(page, "run-change-told").data
    assert "run-change" not in tell("", told)
    first = tell("800", told)
    assert "What changed at step 800" in str(first["run-change"])
    told = first["run-change-told"]["data"]
    server.asked.clear()
    assert tell("800", told) is None, "another control was moved"
    assert server.asked == []
    assert "run-change" not in tell("800", told, reported=1), "the run has reported, far from there"
    assert "What changed at step 1,200" in str(tell("1200", told)["run-change"])
    assert tell("", told)["run-change"]["children"] is None
