"""The incident page: where an alert leads, what it says of before and after, its causes, and what one may write."""

import time
from dataclasses import replace

import numpy as np
import pytest
from collage_dashboard.incident_evidence import read_incident_evidence
from collage_dashboard.pages.incident_content import body

from collage_monitor import wire
from collage_monitor.alerts import ALERTS
from collage_monitor.run_history import read_history
from tests.browser.test_layout import LOOKS, serious_violations
from tests.dashboard.generated import GeneratedRun
from tests.dashboard.walk import text
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.browser]

HOSTILE = '<img src=x onerror="alert(1)">' + "n" * 250
NOTE = '<b>cooling</b> of node 3 failed & "swapped"'
DROP = 400


def left_of(totals, share):
    """Totals where only this share of the updates arrives."""
    sums = ("intended_effective_sum", "effective_squared_sum", "intended_visible_sum")
    return {key: totals[key] * share for key in sums}


RESUMED = 300


def emptied(totals, step):
    """Resumed without its residuals: at the first step 97.7 % of them are 0 again, and none a step later."""
    return {
        "residual_elements": totals["elements"],
        "residual_dropped": 0.977 * totals["elements"] * (step == RESUMED),
    }


def overflowed(name="overflowed"):
    """Its weights are infinite from half of the run on: this server's own evaluation finds that at once."""

    def sums(totals, step):
        return {"nonfinite_parameters": 0 * totals["elements"] + 3.0 * (step > 100)}

    return GeneratedRun(name, "plus", state="running", run_id="run-inf", sums=sums)


EMPTIED = GeneratedRun("emptied", "plus", steps=RESUMED - 10, state="running", sums=emptied)


@pytest.fixture(scope="module")
def runs():
    """One drops: half of its layers lose half of their updates from a step on, where its rate falls to a tenth.

    One declines: never good, it loses more all the while, a little more at once from that step on; its rate rises
    for 40 steps. One is resumed without its residuals, and one overflows.
    """

    def dropping(totals, step):
        odd = np.arange(len(totals["elements"])) % 2
        return left_of(totals, np.where(odd & (step > DROP), 0.5, 1.0))

    def declining(totals, step):
        return left_of(totals, 0.7 - step / 1000 - 0.06 * (step > DROP))

    rates = [
        lambda step: {"learning_rate": 2e-4 if step <= DROP else 2e-5},
        lambda step: {"learning_rate": 2e-4 * min(step / 40, 1.0)},
    ]
    live: dict = {"steps": 600, "state": "running"}
    return [
        GeneratedRun(HOSTILE, "plus", **live, run_id="run-drop", sums=dropping, logs=rates[0]),
        GeneratedRun("declining", "plus", **live, run_id="run-decline", sums=declining, logs=rates[1]),
        EMPTIED,
        overflowed(),
    ]


@pytest.fixture(scope="module", autouse=True)
def fired(client):
    """Alertmanager has sent two alerts."""
    drop = {"alertname": "CollageEdqDrop", "run_id": "run-drop", "run": HOSTILE}
    low = {"alertname": "CollageEdqLow", "run_id": "run-decline", "run": "declining", "key": "edq_ratio"}
    severe = {"severity": "warning"}
    sent = [wire.AlertmanagerAlert("firing", labels | severe, {"summary": "EDQ fell"}) for labels in (drop, low)]
    client.post("/alerts/alertmanager", wire.AlertmanagerMessage(alerts=sent), wire.AlertmanagerAnswer)


def test_since_when_is_one_answer_of_list_page_and_incident(goto, client):
    page = goto("/incident?run=run-decline&alert=CollageEdqLow")
    page.locator(".answer", has_text="EDQ is beyond the alert's threshold since step 10").wait_for()
    goto("/run/run-decline")
    page.locator(".answer", has_text="since the first measured step (10)").wait_for()
    onset = read_history(client, "run-decline").onset
    assert onset is not None, "a step of the decline is found, and not told as its cause"
    assert onset.last_before == DROP


def test_a_rate_whose_warm_up_is_over_is_not_said_to_rise(client):
    incident = client.incidents(run_id="run-decline").events[0]
    found = ALERTS["CollageEdqLow"].checks[0](read_incident_evidence(client, incident))
    assert found.holds is False
    assert found.because.endswith("it does not rise")


@pytest.mark.parametrize("fired_at", [RESUMED, RESUMED + 20, RESUMED + 200])
def test_a_resume_divides_before_from_after_whenever_the_alert_is_evaluated(client, send, fired_at):
    send(replace(EMPTIED, steps=600), first=RESUMED)
    incident = wire.Incident(
        incident_id="1",
        alert="CollageResidualsOff",
        severity="warning",
        source="server",
        state="firing",
        text="residuals were dropped",
        started_at=time.time(),
        run_id="run-emptied",
        labels={"key": "residual_dropped_ratio"},
        step=fired_at,
    )
    found = read_incident_evidence(client, incident)
    assert "At the resume at step 300, 97.7 % of the residuals were dropped." in text(body(found))
    assert found.before is not None
    assert found.after is not None
    assert (found.before.last_step, found.after.first_step) == (RESUMED - 10, RESUMED)
    assert found.before.number("residual_dropped_ratio") == 0
    assert found.after.number("residual_dropped_ratio") == pytest.approx(0.977)


def cells(row):
    """What the cells of a row say."""
    row.get_by_role("cell").nth(3).wait_for()
    return row.get_by_role("cell").all_inner_texts()


def test_an_alerts_link_leads_to_what_changed(goto):
    page = goto("/incident?run=run-drop&alert=CollageEdqDrop")
    page.get_by_role("heading", level=1, name=ALERTS["CollageEdqDrop"].summary).wait_for()
    page.locator(".answer", has_text="changed between steps 400 and 410: 1.000 before, 0.7").wait_for()
    table = page.get_by_role("region", name="Before and after")
    rate = cells(table.get_by_role("row", name="Learning rate"))
    assert rate[1:] == ["0.0002000", "2.000e−05", "× 0.100"]
    assert table.get_by_role("row", name="Clip ratio").count() == 0, "what did not change is folded"
    table.get_by_text("that hardly changed").click()
    assert "not reported" in table.get_by_role("row", name="Clip ratio").inner_text()
    assert cells(table.get_by_role("row", name="Ranks that reported"))[1:3] == ["1 of 1", "1 of 1"]
    page.get_by_role("heading", name="Layers that changed, 6 of 12").wait_for()
    causes = page.locator(".cause")
    causes.nth(2).wait_for()
    assert causes.count() == 3
    assert "Evidence for it: learning_rate was 0.0002 before and 2e-05 after" in causes.nth(0).inner_text()
    assert "Ruled out: no attempt began" in causes.nth(1).inner_text()
    assert "Ruled out: gaps beside the weights grew by a factor of" in causes.nth(2).inner_text()
    page.wait_for_selector("#incident-figure .scatterlayer .trace")
    assert serious_violations(page, 1440) == []
    page.get_by_role("region", name="Layers that changed").get_by_role("link").first.click()
    page.wait_for_url("**/run/run-drop?layer=*")
    goto("/incident/never-fired")
    page.get_by_role("heading", name="No such incident is known here").wait_for()


def test_the_servers_own_incident_is_acknowledged_and_noted_from_its_page(goto, client):
    (incident,) = until(
        lambda: client.incidents(run_id="run-inf", alert="CollageNotFinite").events, "the server's evaluation"
    )
    page = goto("/run/run-inf")
    page.get_by_role("main").get_by_role("link", name="Incidents").click()
    page.get_by_text("incident open.").wait_for()
    first = page.locator(".incident-table td").first.inner_text()
    assert first.split("\n") == ["CollageNotFinite", "Non-finite weights"]
    name = client.run("run-inf").name
    assert page.locator(".incident-table a", has_text=name).count() == 1, "a run goes by its name"
    page.locator("#page .crumbs", has_text=f"Only {name}. Show all").wait_for()
    fired = page.locator(".incident-table time")
    local = page.evaluate("at => new Date(at).toTimeString().slice(0, 5)", fired.get_attribute("datetime"))
    assert fired.inner_text().endswith(local), "as the reader's clock has it"
    assert fired.get_attribute("title").endswith(" UTC")
    page.get_by_role("link", name="CollageNotFinite").click()
    page.locator(".answer", has_text="Non-finite weights is beyond the alert's threshold since step 110").wait_for()
    page.locator(".cause", has_text="Ruled out: 0 were not finite before, 36 after").wait_for()
    table = page.get_by_role("region", name="Before and after")
    assert cells(table.get_by_role("row", name="Non-finite weights"))[1:3] == ["0", "36"]
    page.get_by_role("button", name="Acknowledge").click()
    page.get_by_text("acknowledged by server-token").wait_for()
    assert client.incident(incident.incident_id).acknowledged_by == "server-token"
    page.get_by_role("button", name="Undo acknowledgement").press("Enter")
    page.get_by_role("button", name="Acknowledge", exact=True).wait_for()
    assert client.incident(incident.incident_id).acknowledged_by is None
    page.get_by_label("Note for the run's timeline").fill(NOTE)
    page.get_by_role("button", name="Add note").click()
    timeline = page.get_by_role("region", name="Timeline")
    timeline.get_by_text(f"server-token: {NOTE}").wait_for()
    notes = [event.text for event in client.events("run-inf").events if event.kind == "note"]
    assert notes == [f"server-token: {NOTE}"]
    assert page.get_by_label("Note for the run's timeline").input_value() == ""
    timeline.get_by_text("CollageNotFinite firing").wait_for()
    assert page.get_by_text(incident.text).count() == 1, "what the incident says stands once on its page"


def test_incidents_are_filtered_and_acknowledged_together(goto, client):
    page = goto("/incidents")
    page.get_by_text("fired in the last 12 hours").wait_for()
    rows = page.locator(".incident-table tbody tr")
    until(lambda: rows.count() >= 3, "all incidents")
    page.locator("#incidents-by-alert").click()
    page.get_by_role("option", name="CollageEdqLow").click()
    page.wait_for_function("location.search === '?alert=CollageEdqLow'")
    until(lambda: rows.count() == 1, "the filter")
    page.get_by_role("button", name="Acknowledge it").click()
    page.get_by_text("acknowledged by server-token").wait_for()
    (incident,) = client.incidents(alert="CollageEdqLow").events
    assert incident.acknowledged_by == "server-token"
    assert client.incidents(alert="CollageEdqDrop").events[0].acknowledged_by is None
    said = page.locator("#incidents-undo", has_text="Acknowledged 1 incident. ")
    assert serious_violations(page, 1440) == []
    said.get_by_role("button", name="Undo").press("Enter")
    page.get_by_role("button", name="Acknowledge it").wait_for()
    page.locator("#incidents-undo:empty").wait_for(state="attached")
    assert client.incidents(alert="CollageEdqLow").events[0].acknowledged_by is None
    page.go_back()
    until(lambda: rows.count() >= 3, "all incidents again")
    goto("/incidents?severity=info")
    page.get_by_text("No alert has fired here").wait_for()


PAGES = {"/incidents": ".incident-table", "/incident?run=run-drop&alert=CollageEdqDrop": ".cause"}


@pytest.mark.nightly
@LOOKS
@pytest.mark.parametrize("path", PAGES)
def test_pages_of_incidents_fit_and_can_be_used_by_everyone(goto, path, scheme, width):
    assert serious_violations(goto(path, PAGES[path], scheme=scheme), width) == []
