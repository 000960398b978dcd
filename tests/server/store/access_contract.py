"""What access control asks of any store; a backend's test file only names the backend."""

from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from collage_server.auth.administration import (
    create_token,
    end_session,
    end_sessions,
    new_audit_log_entry,
    open_session,
    revoke_token,
)
from collage_server.auth.principals import Person, digest_of
from collage_server.errors import BadRequest, NotFound, Unprocessable
from collage_server.settings import Settings
from collage_server.store import LogOut, RunQuery
from collage_server.store.access.access_store import append_to_audit_log
from sqlalchemy.exc import IntegrityError

from collage_monitor import wire
from tests.server.samples import report
from tests.server.store.sending import append, fill
from tests.server.store.stores import NOW
from tests.waiting import at_once


def make(store, role="read", projects=None, now=NOW):
    return create_token(store.access, wire.TokenCreate(name="n", role=role, projects=projects), now, "host")


def begin(store, subject, provider_session=None, now=NOW):
    grants = (wire.Grant(role="read", projects=["p", "q"]), wire.Grant(role="operate", projects=["p"]))
    person = Person(subject, subject.title(), grants, provider_session)
    settings = Settings(folder=Path("/data"), no_auth=True)
    return open_session(store.access, person, settings, now, "dashboard")


def runs_of(store, project):
    return [run.run_id for run in store.runs.page(RunQuery(project=project), NOW, 600.0).runs]


def record(store, *entries):
    with store.writing() as connection:
        append_to_audit_log(connection, list(entries))


def at_most(limited, most):
    """A quota."""

    def check(_project, what, _added, count):
        if what == limited and count() > most:
            raise Unprocessable(what)

    return check


class AccessContract:
    """Needs the fixture `store`: open and empty."""

    def test_tokens_are_found_by_digest_until_revoked(self, store):
        first, second = make(store, "ingest", ["p", "q"]), make(store, "admin", now=NOW + 1)
        known = {digest_of(made.secret): made.token for made in (first, second)}
        assert store.access.unrevoked_tokens() == known
        assert store.access.tokens() == [second.token, first.token]
        with pytest.raises(NotFound):
            revoke_token(store.access, "none", NOW, "host")
        revoked = revoke_token(store.access, first.token.token_id, NOW + 2, "host")
        assert revoke_token(store.access, first.token.token_id, NOW + 9, "host") == revoked
        assert list(store.access.unrevoked_tokens()) == [digest_of(second.secret)]
        actions = [entry.action for entry in store.access.audit_log(None, 10).acts]
        assert actions == ["token.revoke", "token.create", "token.create"]

    def test_a_session_comes_back_as_it_was(self, store):
        session = begin(store, "ada", "s-1")
        assert store.access.unrevoked_tokens() == {digest_of(session.secret): session.token}
        assert store.access.tokens() == [session.token]
        assert session.token.also == [wire.Grant(role="operate", projects=["p"])]
        assert (session.token.expires_at, session.token.idle_seconds) == (NOW + 43_200, 3_600)

    def test_sessions_that_are_over_go_with_the_next_and_tokens_stay(self, store):
        kept = [make(store).token for _ in range(2)]
        revoke_token(store.access, kept[0].token_id, NOW, "host")
        ended, running = begin(store, "ada"), begin(store, "bob")
        end_session(store.access, ended.token.token_id, NOW + 1)
        third = begin(store, "ada", now=NOW + 2)
        known = {token.token_id for token in store.access.tokens()}
        assert known == {token.token_id for token in (*kept, running.token, third.token)}
        fourth = begin(store, "ada", now=NOW + 43_201)
        known = {token.token_id for token in store.access.tokens()}
        assert known == {token.token_id for token in (*kept, third.token, fourth.token)}

    def test_a_log_out_ends_whose_sessions_it_is_about(self, store):
        names = ("ada-1", "ada-2", "ada", "bob-1", "bob")
        sessions = {name: begin(store, *name.split("-")).token.token_id for name in names}
        make(store)

        def left():
            valid = {token.token_id for token in store.access.unrevoked_tokens().values()}
            return {name for name, token_id in sessions.items() if token_id in valid}

        for subject, provider_session, expected in (
            (None, "2", {"ada-1", "ada", "bob-1", "bob"}),
            ("bob", "7", {"ada-1", "ada", "bob-1"}),
            ("carl", None, {"ada-1", "ada", "bob-1"}),
            ("carl", "1", {"ada-1", "ada", "bob-1"}),
            ("ada", None, {"bob-1"}),
        ):
            log_out = LogOut(digest_of(f"{subject} {provider_session}"), NOW + 60, subject, provider_session)
            end_sessions(store.access, log_out, NOW + 1)
            assert left() == expected
        ended = [entry for entry in store.access.audit_log(None, 100).acts if entry.action == "session.end"]
        assert {entry.subject for entry in ended} == set(sessions.values()) - {sessions["bob-1"]}
        assert {entry.actor for entry in ended} == {"oidc-provider"}
        assert len(store.access.unrevoked_tokens()) == 2

    def test_a_log_out_token_counts_once_until_it_expires_at_several_servers_too(self, store):
        log_out = LogOut(digest_of("one"), NOW + 60, "ada", None)
        taken: list[bool] = []

        def take():
            with suppress(BadRequest):
                end_sessions(store.access, log_out, NOW)
                taken.append(True)

        at_once(*[take] * 8)
        assert taken == [True]
        session = begin(store, "ada")
        for now in (NOW, NOW + 59):
            with pytest.raises(BadRequest):
                end_sessions(store.access, log_out, now)
        assert list(store.access.unrevoked_tokens()) == [digest_of(session.secret)]
        other = LogOut(digest_of("two"), NOW + 60, "ada", None)
        end_sessions(store.access, other, NOW + 59)
        assert store.access.unrevoked_tokens() == {}
        end_sessions(store.access, log_out, NOW + 60)

    def test_last_use_only_moves_forward(self, store):
        made = [make(store).token.token_id for _ in range(2)]
        store.access.note_uses(dict.fromkeys(made, NOW + 5))
        store.access.note_uses({made[0]: NOW + 3, made[1]: NOW + 8, "gone": NOW})
        found = {token.token_id: token.last_used_at for token in store.access.tokens()}
        assert found == {made[0]: NOW + 5, made[1]: NOW + 8}

    def test_pages_of_the_audit_log_skip_nothing_at_equal_times(self, store):
        entries = [new_audit_log_entry(NOW, "host", "test", str(i), details={"i": i}) for i in range(7)]
        record(store, *entries)
        page = store.access.audit_log(None, 3)
        seen = page.acts
        while page.cursor is not None:
            page = store.access.audit_log(page.cursor, 3)
            seen += page.acts
        assert sorted(seen, key=lambda entry: entry.subject) == entries
        for bad in ("zz", "MHgxcDk5OTk5OTkgYQ=="):
            with pytest.raises(Unprocessable):
                store.access.audit_log(bad, 3)

    def test_old_entries_of_the_audit_log_go_and_no_others(self, store):
        record(store, *(new_audit_log_entry(NOW + time, "host", "test", str(time)) for time in range(1200)))
        assert [store.expiry.expire_audit_log(NOW + 1190) for _ in range(4)] == [500, 500, 190, 0]
        left = [int(entry.subject) for entry in store.access.audit_log(None, 100).acts]
        assert left == [*range(1199, 1189, -1)]

    def test_a_deletion_and_its_audit_log_entry_stand_together_or_not_at_all(self, store):
        fill(store)
        entry = new_audit_log_entry(NOW, "host", "run.delete", "r1")
        record(store, entry)
        with pytest.raises(IntegrityError):
            store.runs.delete("r1", NOW, [entry])
        assert store.runs.get("r1").project == "p"
        store.runs.delete("r1", NOW, [new_audit_log_entry(NOW, "host", "run.delete", "r1")])
        assert [entry.subject for entry in store.access.audit_log(None, 9).acts] == ["r1"] * 2

    def test_whose_a_run_and_a_stream_are_outlives_deletion_and_layers_are_counted_by_project(self, store):
        fill(store)
        for run_id, stream_id, project in (("r2", "s2", "p"), ("r3", "s3", "q")):
            fill(store, run_id, stream_id, project)
        assert [store.access.count_layers(project) for project in ("p", "q", "none")] == [6, 3, 0]
        for deleted in (False, True):
            if deleted:
                store.runs.delete("r1", NOW)
            assert store.access.project_of("r1") == "p"
            assert store.access.project_of_stream("s0") == "p"
        assert store.access.project_of("none") is None
        assert store.access.project_of_stream("none") is None

    def test_gaps_and_the_clock_of_a_stream(self, store, stream):
        append(store, stream, report(0, 10, time=NOW + 2.0), report(4, 20, time=NOW - 9.0))
        for first in (1, 2):
            store.journal.record_gaps(stream, [wire.ReportGap(first_seq=first, last_seq=2, reason="full")], NOW)
        [known] = store.streams.of_run("r1")
        assert (known.given_up, known.missing, known.clock_skew_seconds) == (2, 1, 2.0)

    def test_runs_created_at_once_do_not_overshoot_a_quota(self, store):
        """Counted where they are added: of ten at once, as many as there is room for."""
        refused, check = [], at_most("runs", 3)

        def create(number):
            try:
                store.runs.create("p", wire.RunCreate(run_id=f"q{number}"), NOW, check)
            except Unprocessable:
                refused.append(number)

        at_once(*[partial(create, number) for number in range(10)])
        assert len(runs_of(store, "p")) == 3
        assert len(refused) == 7
        assert store.runs.create("q", wire.RunCreate(run_id="other"), NOW, check)[1]

    def test_tags_beyond_a_quota_are_undone(self, store):
        check = at_most("tags", 2)
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
