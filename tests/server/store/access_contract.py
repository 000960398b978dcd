"""What access control asks of any store; a backend's test file only names the backend."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from collage_server.auth.administration import create_token, new_audit_log_entry, revoke_token
from collage_server.auth.principals import digest_of
from collage_server.errors import NotFound, Unprocessable
from collage_server.store import ReportGroup, RunQuery
from collage_server.store.access.tokens import append_to_audit_log
from sqlalchemy.exc import IntegrityError

from collage_monitor import wire
from tests.server.samples import report, stream_create

NOW = 1_700_000_000.0


def make(store, role="read", projects=None, now=NOW):
    return create_token(store.access, wire.TokenCreate(name="n", role=role, projects=projects), now, "host")


def fill(store, project, run_id, tags=()):
    store.runs.create(project, wire.RunCreate(run_id=run_id, tags=list(tags)), NOW)
    store.streams.create_attempt(run_id, wire.AttemptCreate(launch_id="l", first_step=1), NOW)
    store.streams.create_stream(run_id, stream_create(f"{run_id}-s", "l"), NOW)


def runs_of(store, project):
    return [run.run_id for run in store.runs.page(RunQuery(project=project), NOW, 600.0).runs]


def record(store, entry):
    with store.writing() as connection:
        append_to_audit_log(connection, [entry])


class AccessContract:
    """Needs the fixture `store`: open and empty."""

    def test_tokens_are_found_by_digest_until_revoked(self, store):
        first, second = make(store, "ingest", ["p", "q"]), make(store, "admin", now=NOW + 1)
        assert store.access.valid_tokens() == {
            digest_of(first.secret): first.token,
            digest_of(second.secret): second.token,
        }
        assert store.access.tokens() == [second.token, first.token]
        revoked = revoke_token(store.access, first.token.token_id, NOW + 2, "host")
        assert revoke_token(store.access, first.token.token_id, NOW + 9, "host") == revoked
        assert list(store.access.valid_tokens()) == [digest_of(second.secret)]
        assert [entry.action for entry in store.access.audit_log(None, 10).acts] == [
            "token.revoke",
            "token.create",
            "token.create",
        ]

    def test_an_unknown_token_cannot_be_revoked(self, store):
        with pytest.raises(NotFound):
            revoke_token(store.access, "none", NOW, "host")
        assert store.access.audit_log(None, 10).acts == []

    def test_last_use_only_moves_forward(self, store):
        made = [make(store).token.token_id for _ in range(2)]
        store.access.note_uses(dict.fromkeys(made, NOW + 5))
        store.access.note_uses({made[0]: NOW + 3, made[1]: NOW + 8, "gone": NOW})
        found = {token.token_id: token.last_used_at for token in store.access.tokens()}
        assert found == {made[0]: NOW + 5, made[1]: NOW + 8}

    def test_pages_of_the_audit_log_skip_nothing_at_equal_times(self, store):
        entries = [new_audit_log_entry(NOW, "host", "test", str(i), details={"i": i}) for i in range(7)]
        for entry in entries:
            record(store, entry)
        seen, cursor = [], None
        while True:
            page = store.access.audit_log(cursor, 3)
            seen += page.acts
            cursor = page.cursor
            if cursor is None:
                break
        assert sorted(seen, key=lambda entry: entry.subject) == entries
        for bad in ("zz", "MHgxcDk5OTk5OTkgYQ=="):
            with pytest.raises(Unprocessable):
                store.access.audit_log(bad, 3)

    def test_old_entries_of_the_audit_log_go_and_no_others(self, store):
        with store.writing() as connection:
            append_to_audit_log(
                connection, [new_audit_log_entry(NOW + time, "host", "test", str(time)) for time in range(1200)]
            )
        assert [store.expiry.expire_audit_log(NOW + 1190) for _ in range(4)] == [500, 500, 190, 0]
        assert [int(entry.subject) for entry in store.access.audit_log(None, 100).acts] == list(
            range(1199, 1189, -1)
        )

    def test_a_deletion_and_its_audit_log_entry_stand_together_or_not_at_all(self, store):
        fill(store, "p", "r1")
        entry = new_audit_log_entry(NOW, "host", "run.delete", "r1")
        record(store, entry)
        with pytest.raises(IntegrityError):
            store.runs.delete("r1", NOW, [entry])
        assert store.runs.get("r1").project == "p"
        store.runs.delete("r1", NOW, [new_audit_log_entry(NOW, "host", "run.delete", "r1")])
        assert [entry.subject for entry in store.access.audit_log(None, 9).acts] == ["r1"] * 2

    def test_whose_a_run_and_a_stream_are_outlives_deletion(self, store):
        fill(store, "p", "r1")
        for _ in range(2):
            assert store.access.project_of("r1") == "p"
            assert store.access.project_of_stream("r1-s") == "p"
            if runs_of(store, "p"):
                store.runs.delete("r1", NOW)
        assert store.access.project_of("none") is None
        assert store.access.project_of_stream("none") is None

    def test_layers_are_counted_by_project(self, store):
        fill(store, "p", "r1", ["x", "y"])
        fill(store, "p", "r2", ["y", "z"])
        fill(store, "q", "r3", ["w"])
        assert [store.access.count_layers(project) for project in ("p", "q", "none")] == [6, 3, 0]

    def test_gaps_and_the_clock_of_a_stream(self, store):
        fill(store, "p", "r1")
        record = store.streams.stream_record("r1-s")
        store.journal.append(
            [ReportGroup(record, [report(0, 10, time=NOW + 2.0), report(4, 20, time=NOW - 9.0)])], NOW
        )
        store.journal.record_gaps(record, [wire.ReportGap(first_seq=1, last_seq=2, reason="full")], NOW)
        store.journal.record_gaps(record, [wire.ReportGap(first_seq=2, last_seq=2, reason="full")], NOW)
        [stream] = store.streams.of_run("r1")
        assert (stream.given_up, stream.missing, stream.clock_skew_seconds) == (2, 1, 2.0)

    def test_runs_created_at_once_do_not_overshoot_a_quota(self, store):
        """Counted where they are added: of ten at once, as many as there is room for."""
        refused = []

        def check(_project, what, count):
            if what == "runs" and count > 3:
                raise Unprocessable(f"{count} {what}")

        def create(number):
            try:
                store.runs.create("p", wire.RunCreate(run_id=f"q{number}"), NOW, check)
            except Unprocessable:
                refused.append(number)

        with ThreadPoolExecutor(10) as pool:
            list(pool.map(create, range(10)))
        assert len(runs_of(store, "p")) == 3
        assert len(refused) == 7
        assert store.runs.create("q", wire.RunCreate(run_id="other"), NOW, check)[1]

    def test_tags_beyond_a_quota_are_undone(self, store):
        def check(_project, what, count):
            if what == "tags" and count > 2:
                raise Unprocessable(f"{count} {what}")

        store.runs.create("p", wire.RunCreate(run_id="a", tags=["x", "y"]), NOW, check)
        for refused in (
            lambda: store.runs.create("p", wire.RunCreate(run_id="b", tags=["z"]), NOW, check),
            lambda: store.runs.update("a", wire.RunUpdate(tags=["x", "y", "z"]), NOW, check),
        ):
            with pytest.raises(Unprocessable):
                refused()
        assert store.runs.get("a").tags == ["x", "y"]
        assert runs_of(store, "p") == ["a"]
        assert store.runs.update("a", wire.RunUpdate(tags=["x", "z"]), NOW, check).tags == ["x", "z"]
