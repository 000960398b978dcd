"""Tags and notes, edited where they stand: in the table of runs and on a run's page."""

import pytest

from collage_monitor import wire
from tests.dashboard.generated import GeneratedRun
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.browser]

COMMA_TAG = 'lr 0.1, "warm"'
HOSTILE_TAG = "<img src=x onerror=alert(1)>"
NOTES = 'first <b>line</b>\nsecond & "last"'


@pytest.fixture(scope="module")
def runs():
    return [GeneratedRun("plain", "plain", run_id="run-plain"), GeneratedRun("plus", "plus", run_id="run-plus")]


def cell(page, run_id, column):
    return page.locator(f'.ag-row[row-id="{run_id}"] .ag-cell[col-id="{column}"]')


@pytest.mark.nightly
def test_a_run_is_described_in_the_table_by_its_reader_and_by_others(goto, client):
    page = goto("/runs", width=2400)
    cell(page, "run-plain", "tags").dblclick()
    page.keyboard.press("Control+A")
    page.keyboard.type(f"baseline, {HOSTILE_TAG}, baseline")
    page.keyboard.press("Enter")
    until(lambda: client.run("run-plain").tags == ["baseline", HOSTILE_TAG], "the tags are kept")
    cell(page, "run-plain", "tags").get_by_text(f"baseline, {HOSTILE_TAG}", exact=True).wait_for()
    cell(page, "run-plain", "notes").click()
    page.keyboard.press("Enter")
    page.keyboard.type("by keyboard alone")
    page.keyboard.press("Enter")
    until(lambda: client.run("run-plain").notes == "by keyboard alone", "the notes are kept")
    page.reload()
    cell(page, "run-plain", "notes").get_by_text("by keyboard alone").wait_for()
    client.update_run("run-plain", wire.RunUpdate(tags=[COMMA_TAG], notes="from elsewhere"))
    cell(page, "run-plain", "notes").get_by_text("from elsewhere").wait_for()
    cell(page, "run-plain", "tags").dblclick()
    page.keyboard.press("End")
    page.keyboard.type(", more")
    page.keyboard.press("Enter")
    until(lambda: client.run("run-plain").tags == [COMMA_TAG, "more"], "one tag is kept and one added")


WRITE_AND_PRESS = """async (box, [text, button]) => {
    const turns = async () => { for (let turn = 0; turn < 20; turn++) await null; };
    box.focus();
    Object.getOwnPropertyDescriptor(Object.getPrototypeOf(box), "value").set.call(box, text);
    box.dispatchEvent(new Event("input", {bubbles: true}));
    await turns();
    button.focus();
    await turns();
    button.click();
}"""
"""As people do it on a page that still draws: no timer ends between the last key and the press of the button."""


def test_a_run_is_described_on_its_page(goto, client):
    page = goto("/run/run-plus?tab=about")
    tags = page.get_by_role("textbox", name="Tags")
    tags.fill(HOSTILE_TAG)
    tags.press("Enter")
    save = page.get_by_role("button", name="Save").element_handle()
    page.get_by_label("Notes").evaluate(WRITE_AND_PRESS, [NOTES, save])
    page.get_by_text("Saved.").wait_for()
    run = client.run("run-plus")
    assert run.tags == ["test", HOSTILE_TAG]
    assert run.notes == NOTES
    page.reload()
    page.get_by_text(HOSTILE_TAG, exact=True).wait_for()
    assert page.get_by_label("Notes").input_value() == NOTES


def test_what_the_token_may_not_change_stays_and_is_said(open_page, dashboard, server_url, client, tmp_path):
    made = client.create_token(wire.TokenCreate(name="reader", role="read", projects=None))
    (tmp_path / "token").write_text(made.secret)
    before = client.run("run-plain").tags
    fired = {"alertname": "CollageEdqDrop", "run_id": "run-plain", "severity": "warning"}
    alert = wire.AlertmanagerAlert(status="firing", labels=fired, annotations={"summary": "EDQ fell"})
    client.post("/alerts/alertmanager", wire.AlertmanagerMessage(alerts=[alert]), wire.AlertmanagerAnswer)
    with dashboard(server_url[0], tmp_path / "token", tmp_path) as url:
        page = open_page(url, width=2400).page
        page.goto(f"{url}/runs")
        cell(page, "run-plain", "tags").dblclick()
        page.keyboard.type("mine")
        page.keyboard.press("Enter")
        page.get_by_text("This token may not change anything").wait_for()
        page.goto(f"{url}/incident?run=run-plain&alert=CollageEdqDrop")
        page.get_by_role("button", name="Acknowledge").click()
        page.get_by_text("This token may not change anything").wait_for()
        page.goto("about:blank")
    assert client.run("run-plain").tags == before
    assert client.incidents().events[0].acknowledged_by is None
