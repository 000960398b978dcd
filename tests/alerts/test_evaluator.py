"""The evaluator on a server's own runs: what fires is kept with its reason, ends, and outlives a server."""

from dataclasses import replace

import pytest
from collage_server.alerts import AlertEvaluator, AlertRounds
from collage_server.alerts.condition_evaluation import identity_labels
from collage_server.store.runs.incidents import alert_key
from collage_server.summariser import keep_overview
from sqlalchemy import text

from collage_monitor import wire
from collage_monitor.alerts import ALERTS, alert
from tests.server.guarded import guarded_server
from tests.server.reads import current_samples, evaluate_due
from tests.server.samples import report
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.slow

SECONDS = 30.0
FINDING = "collage_finding"


def evaluator(server, *names, **more):
    app_state = server.app.state.collage
    return AlertEvaluator(
        app_state.store,
        lambda: current_samples(app_state),
        [alert(name) for name in names] or ALERTS.values(),
        clock=server.clock,
        interval_seconds=SECONDS,
        **more,
    )


def incidents(server, **query):
    asked = "&".join(f"{name}={value}" for name, value in query.items())
    return server.get(f"/events?{asked}", wire.IncidentPage).events


def update(server, **what):
    server.send("PATCH", "/runs/r1", wire.RunUpdate(**what), wire.Run)


def rounds(server, work, seconds, *, alive=True):
    """Rounds of the evaluation for so long; a run that is alive logs once a minute."""
    for place in range(round(seconds / SECONDS)):
        server.clock.now += SECONDS
        if alive and place % 2 == 0:
            seq = 1000 + int(server.clock.now - 1_700_000_000)
            server.reports([report(seq, 2000, measured=False, scalars={"loss": 3.0})])
        evaluate_due(server.app.state.collage.store)
        work.do_due_work()


def test_each_server_knows_when_alerts_were_last_evaluated(server):
    gauge = "collage_server_alerts_evaluated_timestamp_seconds"
    rounds_of = server.app.state.collage.alert_rounds
    assert f"\n{gauge} " not in server.get("/metrics"), "nothing is said before the first round"
    first, second = AlertRounds(), rounds_of
    holder, other = evaluator(server, rounds=first), evaluator(server, rounds=second)
    holder.do_due_work()
    began = server.clock.now
    assert first.evaluated_at == began
    server.clock.now += SECONDS
    other.do_due_work()
    assert second.evaluated_at == pytest.approx(began)
    (line,) = (line for line in server.get("/metrics").splitlines() if line.startswith(f"{gauge} "))
    assert float(line.split()[1]) == pytest.approx(began)
    holder.do_due_work()
    other.do_due_work()
    assert second.evaluated_at == pytest.approx(began + SECONDS)


@pytest.fixture
def low(server):
    """A run beyond its warm-up whose EDQ reads 0.77."""
    server.filled(steps=range(1000, 1400, 10))
    return server


def test_it_fires_with_its_reason_and_ends_when_the_run_does(low):
    work = evaluator(low, "CollageEdqLow")
    rounds(low, work, 9.5 * 60)
    assert incidents(low) == []
    rounds(low, work, 60)
    (fired,) = incidents(low, run="r1", state="firing")
    assert (fired.alert, fired.severity, fired.project, fired.step) == ("CollageEdqLow", "warning", "p", 2000)
    assert fired.value == pytest.approx(0.7667, abs=1e-3)
    assert "Judged losing updates: " in fired.text
    assert "EDQ is 0.7" in fired.text
    assert "steps 1080 to 1390" in fired.text
    events = low.get("/runs/r1/events", wire.EventPage).events
    assert [event.kind for event in events] == ["attempt", "alert"]
    assert events[1].text.startswith("CollageEdqLow firing (warning): Less than nine tenths")
    update(low, state="finished")
    rounds(low, work, 9 * 60, alive=False)
    assert incidents(low, state="resolved") == []
    rounds(low, work, 2 * 60, alive=False)
    (ended,) = incidents(low, state="resolved")
    assert ended.resolved_at - fired.started_at == pytest.approx(600, abs=120)


def test_the_reason_says_each_sentence_once(server):
    server.filled(steps=())
    server.reports([report(0, 10, measured=False)])
    rounds(server, evaluator(server, "CollageRunStalled"), 20 * 60, alive=False)
    (fired,) = incidents(server, run="r1")
    overview = server.get("/runs/r1/overview", wire.Overview)
    told = overview.headline.rstrip(".").casefold()
    assert told in overview.text.casefold(), "of such a run headline and verdict say the same"
    assert fired.text.casefold().count(told) == 1, "a headline that the verdict repeats is left out"


def test_a_run_in_its_warm_up_and_a_finished_one_do_not_fire(server):
    server.filled(steps=range(10, 60, 10))
    server.filled("r2", "s2", steps=range(1000, 1400, 10))
    server.send("PATCH", "/runs/r2", wire.RunUpdate(state="finished"), wire.Run)
    work = evaluator(server, "CollageEdqLow", "CollageEdqDrop")
    rounds(server, work, 60)
    update(server, state="failed")
    rounds(server, work, 15 * 60, alive=False)
    assert incidents(server) == []


def test_what_the_judgement_holds_against_a_run_is_shown_and_fires(low):
    """Alerts read the evaluation that the table of runs shows: one judgement of a run, kept once."""
    app_state = low.app.state.collage
    app_state.summariser.stop(PATIENCE_SECONDS)
    store, work = app_state.store, evaluator(low, "CollageNotFinite")

    def held():
        found = [(dict(entry.labels), entry.value) for entry in current_samples(app_state) if entry.name == FINDING]
        return {(own["key"], own.get("layer"), own.get("alert")): value for own, value in found}

    sick = wire.Finding("not finite", "", "nonfinite_params", 3.0, layer="head", alert="CollageNotFinite")
    store.summaries.put(store.runs.get("r1"), wire.Overview(run_id="r1", findings=[sick]))
    assert 'collage_finding{alert="CollageNotFinite",key="nonfinite_params",layer="head"' in low.get("/metrics")
    assert held() == {("nonfinite_params", "head", "CollageNotFinite"): 3.0}
    low.clock.now += SECONDS
    work.do_due_work()
    assert [entry.alert for entry in incidents(low)] == ["CollageNotFinite"]
    # The run's own points say nothing of the kind: the next evaluation takes it back.
    found = keep_overview(store, "r1")
    assert found.health == "losing updates"
    own = {(entry.key, entry.layer, entry.alert or None): entry.value for entry in found.against}
    assert held() == own
    assert "CollageEdqLow" in {alert for _, _, alert in own}


def test_another_server_takes_over_what_fires_and_fires_it_no_second_time(low):
    first = evaluator(low, "CollageEdqLow")
    rounds(low, first, 11 * 60)
    second = evaluator(low, "CollageEdqLow")
    second.do_due_work()
    assert second._evaluation is None, "the first one has the lease"
    first.stop(1.0)
    rounds(low, second, 11 * 60)
    assert len(incidents(low)) == 1
    update(low, state="finished")
    rounds(low, second, 11 * 60, alive=False)
    assert [entry.state for entry in incidents(low)] == ["resolved"]


def notified(server, status, **labels):
    """What the server answers to such a message of Alertmanager's about the run."""
    labels = {"alertname": "CollageEdqLow", "run_id": "r1", **labels}
    sent = wire.AlertmanagerAlert(status=status, labels=labels, annotations={"summary": "low"})
    return server.post("/alerts/alertmanager", wire.AlertmanagerMessage(alerts=[sent]), wire.AlertmanagerAnswer)


def test_what_alertmanager_sends_stands_beside_it_once(low):
    named = {"severity": "warning", "job": "collage"}
    assert notified(low, "firing", **named).stored == 1
    rounds(low, evaluator(low, "CollageEdqLow"), 12 * 60)
    (fired,) = incidents(low)
    assert (fired.alert, fired.source, fired.state) == ("CollageEdqLow", "alertmanager", "firing")
    assert notified(low, "resolved", **named).stored == 1
    assert [entry.state for entry in incidents(low)] == ["resolved"]


def test_what_the_server_noticed_first_is_known_when_alertmanager_tells(low):
    rounds(low, evaluator(low, "CollageEdqLow"), 12 * 60)
    for status in ("firing", "resolved"):
        answer = notified(low, status)
        assert (answer.stored, answer.known) == (0, 1)
    assert [(entry.source, entry.state) for entry in incidents(low)] == [("server", "firing")]


def test_routes_of_incidents(low):
    work = evaluator(low, "CollageEdqLow")
    rounds(low, work, 12 * 60)
    (fired,) = incidents(low, project="p")
    taken = low.post(f"/events/{fired.incident_id}/acknowledge", b"", wire.Incident)
    assert taken.acknowledged_by == "loopback"
    assert low.get("/runs/r1/alerts", wire.IncidentPage).events == [taken]
    assert incidents(low, project="other") == []
    assert low.get("/runs/zz/alerts", status=404).field == "run_id"
    assert low.get("/events?state=open", status=422).field == "state"
    silence = low.post("/silences", wire.SilenceCreate(seconds=60.0, run_id="r1"), wire.Silence, status=201)
    assert low.get("/silences", wire.SilenceList).silences == [silence]
    assert incidents(low, project="p")[0].silenced
    assert [entry.alert for entry in low.get("/runs/r1/alerts", wire.IncidentPage).events] == ["CollageEdqLow"]
    assert low.post("/silences", wire.SilenceCreate(seconds=0.0), status=422).field == "seconds"
    refused = low.post("/silences", wire.SilenceCreate(seconds=60.0, comment="all"), status=422)
    assert (refused.field, "every alert" in refused.message) == ("project", True)


def test_a_token_silences_its_own_projects_alone(tmp_path):
    with guarded_server(tmp_path) as opened:
        secret, _ = opened.token("operate", ["mine"])
        for project, status in (("mine", 201), ("theirs", 403), (None, 403)):
            create = wire.SilenceCreate(seconds=60.0, project=project)
            assert opened.ask("POST", "/api/v1/silences", secret, create).status_code == status
        reader, _ = opened.token("read", ["theirs"])
        assert opened.ask("GET", "/api/v1/silences", reader).json() == {"silences": []}


def test_an_alert_of_an_expression_alone_is_left_to_prometheus_and_named(low, caplog):
    entry = replace(alert("CollageEdqLow"), name="Mine", conditions=())
    app_state = low.app.state.collage
    work = AlertEvaluator(
        app_state.store, lambda: current_samples(app_state), [entry], clock=low.clock, interval_seconds=SECONDS
    )
    assert "Prometheus alone evaluates Mine" in caplog.text
    rounds(low, work, 11 * 60)
    assert incidents(low) == []


def test_what_the_database_refuses_is_kept_as_soon_as_it_does_not(low):
    """The evaluation tells of a change once: were it forgotten, the alert would never be seen."""
    store, work = low.app.state.collage.store, evaluator(low, "CollageEdqLow")

    def change(statement):
        with store.writing() as connection:
            connection.execute(text(statement))

    change("CREATE TRIGGER refusing BEFORE INSERT ON incident BEGIN SELECT RAISE(FAIL, 'no room'); END")
    rounds(low, work, 11 * 60)
    assert incidents(low) == []
    change("DROP TRIGGER refusing")
    rounds(low, work, SECONDS)
    (fired,) = incidents(low)
    assert low.clock.now - fired.started_at > SECONDS, "since it fires, not since it could be stored"
    rounds(low, work, 60)
    assert len(incidents(low)) == 1
    update(low, state="finished")
    change("CREATE TRIGGER refusing BEFORE UPDATE ON incident BEGIN SELECT RAISE(FAIL, 'no room'); END")
    rounds(low, work, 11 * 60, alive=False)
    assert [entry.state for entry in incidents(low)] == ["firing"]
    change("DROP TRIGGER refusing")
    rounds(low, work, SECONDS, alive=False)
    assert [entry.state for entry in incidents(low)] == ["resolved"]


def test_a_renamed_run_keeps_its_incident(low):
    """Its series begin anew under the new name; the store knows one incident of both."""
    work = evaluator(low, "CollageEdqLow")
    rounds(low, work, 11 * 60)
    update(low, name="a better name")
    rounds(low, work, 15 * 60)
    assert [entry.state for entry in incidents(low)] == ["firing"]
    update(low, state="finished")
    rounds(low, work, 11 * 60, alive=False)
    assert [entry.state for entry in incidents(low)] == ["resolved"]


def test_the_evaluation_tells_series_apart_as_the_store_does(low):
    """Were it otherwise, one series' end would resolve what another one fires."""
    rounds(low, evaluator(low), SECONDS)
    asked = {condition.series for entry in ALERTS.values() for condition in entry.conditions}
    labels = [sample.labels for sample in current_samples(low.app.state.collage) if sample.name in asked]
    by_store = {alert_key("", dict(own)) for own in labels}
    assert len(by_store) == len({identity_labels(own) for own in labels}) > 1


def test_growth_of_long_ago_fires_no_second_time_after_a_restart(low):
    low.reports([report(900, 2000, measured=False, scalars={"external_writes": 1.0})])
    work = evaluator(low, "CollageExternalWrites")
    rounds(low, work, 60)
    assert incidents(low) == []
    low.reports([report(901, 2000, measured=False, scalars={"external_writes": 2.0})])
    rounds(low, work, 60)
    assert len(incidents(low, state="firing")) == 1
    rounds(low, work, 45 * 60)
    assert incidents(low, state="firing") == []
    work.stop(1.0)
    rounds(low, evaluator(low, "CollageExternalWrites"), 60)
    assert len(incidents(low)) == 1
