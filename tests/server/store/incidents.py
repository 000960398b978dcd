"""What every backend must do with incidents: each once whoever noticed, one holder of a lease, silences, ageing."""

from dataclasses import replace
from functools import partial

import pytest
from collage_server.errors import NotFound, Unprocessable
from collage_server.store import IncidentQuery, NewEvent, NewIncident
from collage_server.store.runs.incidents import incident_id_of

from collage_monitor import wire
from tests.server.reads import due_runs
from tests.server.store.sending import fill
from tests.server.store.stores import NOW
from tests.waiting import at_once

LABELS = {"project": "p", "run": "old name", "run_id": "r1", "strategy": "plain"}
LOW = NewIncident(
    alert="CollageEdqLow",
    severity="warning",
    source="server",
    labels=LABELS,
    text="EDQ is low.",
    started_at=NOW,
    run_id="r1",
    project="p",
    value=0.8,
    step=70,
)


def listed(store, now=NOW, **query):
    return [(entry.alert, entry.state) for entry in store.incidents.read(IncidentQuery(**query), now)]


def expire(store, before, owed_before=NOW + 1e9):
    """How many rows went in all."""
    gone = 0
    while some := store.expiry.expire(before, owed_before):
        gone += some
    return gone


def silence(silence_id, ends_at, run_id=None, alert=None, made_at=NOW):
    about = {"project": None, "run_id": run_id, "alert": alert, "comment": "known", "made_by": "ada"}
    return wire.Silence(silence_id=silence_id, made_at=made_at, ends_at=ends_at, **about)


def _findings(store):
    """What alerts read of the runs that have findings."""
    with store.points.snapshot() as now:
        runs = now.live_runs(None, NOW, None, 10).runs
    return {run.run_id: run.findings for run in runs if run.findings}


class IncidentsContract:
    """Subclasses give the fixture `store` (open, empty)."""

    def test_what_fires_stands_here_once_and_again_after_it_has_ended(self, store):
        fill(store)
        assert store.incidents.fire(LOW, NOW)
        renamed = {**LABELS, "run": "new name", "instance": "a:1"}
        assert not store.incidents.fire(replace(LOW, labels=renamed, started_at=NOW + 1), NOW + 1)
        assert store.incidents.fire(replace(LOW, labels={**LABELS, "key": "decay_ratio"}), NOW)
        assert not store.incidents.resolve("CollageEdqLow", LABELS, "alertmanager", NOW + 2)
        assert store.incidents.is_open("CollageEdqLow", LABELS, "server")
        assert store.incidents.resolve("CollageEdqLow", LABELS, "server", NOW + 2)
        assert not store.incidents.resolve("CollageEdqLow", LABELS, "server", NOW + 3)
        assert store.incidents.fire(replace(LOW, started_at=NOW + 9), NOW + 9)
        states = [entry.state for entry in store.incidents.read(IncidentQuery(), NOW)]
        assert sorted(states) == ["firing", "firing", "resolved"]
        told = [(event.kind, event.step) for event in store.events.read("r1", 0, 100).events]
        assert told[1:] == [("alert", 70), ("alert", 70), ("alert_resolved", None), ("alert", 70)]

    def test_many_who_notice_at_once_store_it_once(self, store):
        fill(store)
        same = [replace(LOW, started_at=NOW + at) for at in range(8)]
        outcomes = at_once(*[partial(store.incidents.fire, incident, NOW) for incident in same])
        assert sorted(outcomes) == [False] * 7 + [True]

    def test_filters_and_pages(self, store):
        fill(store)
        for at in range(3):
            key = {**LABELS, "key": str(at)}
            store.incidents.fire(replace(LOW, labels=key, started_at=NOW + at), NOW)
        server = replace(LOW, alert="CollageDiskNearlyFull", run_id="", project="", labels={})
        store.incidents.fire(server, NOW)
        store.incidents.resolve("CollageEdqLow", {**LABELS, "key": "0"}, "server", NOW + 5)
        assert len(listed(store)) == 4
        assert listed(store, state="resolved") == [("CollageEdqLow", "resolved")]
        assert listed(store, run_id="r1", state="firing") == [("CollageEdqLow", "firing")] * 2
        assert listed(store, projects=["other"]) == []
        assert len(listed(store, projects=["p"])) == 3
        first = store.incidents.read(IncidentQuery(limit=2), NOW)
        cursor = f"{first[-1].started_at.hex()}~{first[-1].incident_id}"
        rest = store.incidents.read(IncidentQuery(cursor=cursor), NOW)
        assert [entry.started_at for entry in (*first, *rest)] == [NOW + 2, NOW + 1, NOW, NOW]
        assert len({entry.incident_id for entry in (*first, *rest)}) == 4
        with pytest.raises(Unprocessable, match="cursor 'x'"):
            listed(store, cursor="x")

    def test_acknowledged_by_whoever_was_first(self, store):
        fill(store)
        store.incidents.fire(LOW, NOW)
        own = incident_id_of(LOW)
        assert store.incidents.acknowledge(own, "ada", NOW + 1, ["p"]).acknowledged_by == "ada"
        again = store.incidents.acknowledge(own, "bob", NOW + 2)
        assert (again.acknowledged_by, again.acknowledged_at) == ("ada", NOW + 1)
        for incident_id, projects in ((own, ["other"]), ("unknown", None)):
            with pytest.raises(NotFound, match="GET /api/v1/events"):
                store.incidents.acknowledge(incident_id, "eve", NOW, projects)
            with pytest.raises(NotFound):
                store.incidents.acknowledge(incident_id, None, NOW, projects)
        back = store.incidents.acknowledge(own, None, NOW + 3, ["p"])
        assert (back.acknowledged_by, back.acknowledged_at) == (None, None)
        assert store.incidents.acknowledge(own, "bob", NOW + 4).acknowledged_by == "bob"
        assert store.incidents.get(own, NOW + 4).acknowledged_at == NOW + 4

    def test_a_silence_covers_what_matches_until_it_ends(self, store):
        fill(store)
        store.incidents.fire(LOW, NOW)
        made = silence("s", NOW + 60, "r1", "CollageEdqLow")
        store.incidents.silence(made)
        store.incidents.silence(silence("t", NOW + 60, "r2", "CollageEdqLow"))
        asked = IncidentQuery(alert="CollageEdqLow")
        assert [entry.silenced for entry in store.incidents.read(asked, NOW + 59)] == [True]
        assert [entry.silenced for entry in store.incidents.read(asked, NOW + 60)] == [False]
        assert made in store.incidents.silences(NOW)
        assert store.incidents.silences(NOW + 60) == []
        ahead = NOW + 3 * 86400
        made = silence("ahead", ahead + 60, alert="CollageNotFinite", made_at=ahead)
        store.incidents.silence(made)
        assert made not in store.incidents.silences(NOW), "of a clock that was ahead"
        assert store.incidents.silences(ahead) == [made]

    def test_what_was_delivered_is_kept_and_an_end_is_owed_anew(self, store):
        fill(store)
        store.incidents.fire(LOW, NOW)
        ((incident, sent),) = store.incidents.unsettled(NOW)
        assert sent == []
        store.incidents.resolve("CollageEdqLow", LABELS, "server", NOW + 1)
        store.incidents.mark_sent(incident, ["webhook/firing"], settled=True)
        ((ended, sent),) = store.incidents.unsettled(NOW)
        assert (ended.state, sent) == ("resolved", ["webhook/firing"])
        store.incidents.mark_sent(ended, [*sent, "webhook/resolved"], settled=True)
        assert list(store.incidents.unsettled(NOW)) == []

    def test_one_holder_of_a_lease(self, store, monkeypatch):
        monkeypatch.setattr(store, "time", lambda _, now: now)
        take = partial(store.incidents.take_lease, "alerts")
        assert take("a", NOW, 10)
        assert not take("b", NOW + 9, 10)
        assert take("a", NOW + 9, 10)
        assert take("b", NOW + 20, 10)
        for gives_up, free in (("nobody", False), ("a", False), ("b", True)):
            store.incidents.give_up_lease("alerts", gives_up)
            assert take("a", NOW + 21, 10) == free

    def test_a_lease_of_a_clock_that_was_ahead_is_void(self, store, monkeypatch, caplog):
        """A server whose clock was three days ahead was killed: no alert was evaluated for three days."""
        monkeypatch.setattr(store, "time", lambda _, now: now)
        take = store.incidents.take_lease
        assert take("alerts", "ahead", NOW + 3 * 86400, 60)
        assert take("alerts", "right", NOW, 60)
        assert "its clock was ahead" in caplog.text
        assert not take("alerts", "other", NOW + 1, 10), "whoever asks for less waits as long"
        assert not take("alerts", "behind", NOW - 5, 60)
        assert take("alerts", "behind", NOW - 3 * 86400, 60), "it cannot know whose clock is wrong, and evaluates"

    def test_a_deleted_run_takes_its_incidents_and_findings_along(self, store):
        fill(store)
        store.incidents.fire(LOW, NOW)
        assert due_runs(store)
        record = store.runs.get("r1")
        held = wire.Overview(run_id="r1", findings=[wire.Finding("decay is lost", "", "decay_ratio", 0.1)])
        store.summaries.put(record, held)
        assert _findings(store) == {"r1": held.findings}
        store.summaries.put(record, wire.Overview(run_id="r1"))
        assert _findings(store) == {}
        store.summaries.put(record, held)
        store.runs.delete("r1", NOW)
        assert (listed(store), _findings(store)) == ([], {})
        assert not store.incidents.fire(LOW, NOW)
        store.summaries.put(record, held)
        assert _findings(store) == {}

    def test_what_ended_long_ago_goes_and_what_is_open_stays(self, store):
        fill(store)
        for place, ended in enumerate((NOW + 5, NOW + 50, None)):
            key = {**LABELS, "key": str(place)}
            store.incidents.fire(replace(LOW, labels=key, started_at=NOW + place), NOW + place)
            if ended is not None:
                store.incidents.resolve("CollageEdqLow", key, "server", ended)
        assert expire(store, NOW + 40, owed_before=NOW - 1) == 3
        assert len(listed(store)) == 3, "a message may still be owed of it"
        for incident, _ in store.incidents.unsettled(NOW + 60):
            store.incidents.mark_sent(incident, [], settled=True)
        assert expire(store, NOW + 40, owed_before=NOW - 1) == 1
        left = [(entry.started_at, entry.state) for entry in store.incidents.read(IncidentQuery(), NOW)]
        assert left == [(NOW + 2, "firing"), (NOW + 1, "resolved")]
        told = [(event.kind, event.time) for event in store.events.read("r1", 0, 100).events]
        assert told == [("alert_resolved", NOW + 5), ("alert_resolved", NOW + 50), ("alert", NOW + 2)]
        assert expire(store, NOW + 1000, owed_before=NOW + 60) == 1
        assert listed(store) == [("CollageEdqLow", "firing")]
        assert len(store.events.read("r1", 0, 100).events) == 3, "all since the open one began"

    def test_notes_and_the_newest_event_stay_so_that_cursors_skip_nothing(self, store):
        for run_id, stream_id in (("r1", "s1"), ("r2", "s2")):
            fill(store, run_id, stream_id)
        made = [NewEvent(origin=f"o{place}", kind="gap", text="a gap") for place in range(3)]
        store.events.add("r1", [*made, NewEvent(origin="n", kind="note", text="ada: kept")], NOW + 1)
        store.events.add("r1", [NewEvent(origin="last", kind="gap", text="a gap")], NOW + 2)
        (cursor,) = (event.event for event in store.events.read("r1", 0, 100).events if event.time == NOW + 2)
        expire(store, NOW + 1000)
        left = store.events.read("r1", 0, 100).events
        assert [event.text for event in left] == ["ada: kept", "a gap"]
        assert len(store.events.read("r2", 0, 100).events) == 1
        store.events.add("r1", [NewEvent(origin="new", kind="gap", text="another")], NOW + 1001)
        assert [event.text for event in store.events.read("r1", cursor, 100).events] == ["another"]
        assert [expire(store, NOW + 1000) for _ in range(2)] == [1, 0], "the cursor's event is not the newest now"

    def test_silences_go_when_they_are_over_or_with_their_run(self, store):
        fill(store)
        for made in (silence("over", NOW + 1), silence("holds", NOW + 99), silence("run", NOW + 99, "r1")):
            store.incidents.silence(made)
        expire(store, NOW + 50)
        assert {entry.silence_id for entry in store.incidents.silences(NOW)} == {"holds", "run"}
        store.runs.delete("r1", NOW)
        assert [entry.silence_id for entry in store.incidents.silences(NOW)] == ["holds"]

    def test_an_overview_that_other_code_made_before_is_due_again_once(self, store, reopen):
        fill(store)
        assert due_runs(store)
        record, said = store.runs.get("r1"), wire.Overview(run_id="r1", headline="as it was said")
        store.summaries.put(record, said, "old")
        assert due_runs(store, 10, "new") == [], "servers of two releases do not take turns"
        assert store.summaries.overview("r1", "new") == said
        store = reopen()
        assert store.summaries.due(10, "old") == []
        assert store.summaries.overview("r1", "new") is None
        assert store.summaries.overview("r1", "old") == store.summaries.overview("r1") == said
        fill(store, "r2", "s2")
        (first, due) = due_runs(store, 10, "new")
        assert [(entry.run_id, entry.is_reworded) for entry in (first, due)] == [("r2", False), ("r1", True)]
        store.summaries.put(record, wire.Overview(run_id="r1"), "new")
        assert [entry.run_id for entry in store.summaries.due(10, "new")] == ["r2"]
