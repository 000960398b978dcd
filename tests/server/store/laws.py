"""The store's life as a law: whatever happened, readers get what was reported, merged by the definitions.

Every backend runs it: reports in any order, twice and late, by shards, replicas and two processes of one rank;
sealing, also killed at any transaction; resumed runs; levels that expire; deleted runs; servers that start anew.
What one attempt, rank and step says differs from what any other says, so that no row can stand for another.
"""

import dataclasses
import itertools
import time
from collections import Counter
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
from collage_server.errors import Gone
from collage_server.store import Selection, schema
from collage_server.store.reading.run_view import RunView
from collage_server.store.row_helpers import ranges_from_json
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from sqlalchemy import select

from collage_monitor import wire
from collage_monitor.statistics import reduce_steps
from tests.server.reads import latest_point, layer_points, model_points, scalar_points
from tests.server.samples import block, report
from tests.server.store.naive import NaiveRun, NaiveStream
from tests.server.store.sending import append, launch, register
from tests.server.store.stores import LIMITS, NOW, finish, paths, purge_all, rows

METRIC = "edq_ratio"
"""Made anew of single steps alone: of merged points it is right where it is asked for by its name."""
WORLDS = st.sampled_from([(0,), (0, 0), (0, 1), (0, 0, 0)])
"""The replica that each rank holds: one rank, shards, replicas."""
KINDS = st.sampled_from(["whole", "halves", "every third", "logged"])
ORDERS = st.sampled_from(["ascending", "descending", "some late"])
FEW_POINTS = {"part_points": 8, "coarse_bytes": 1}
PARTS = st.sampled_from([{}, {"slice_rows": 3}, FEW_POINTS, {"rows": 50}, {"bytes": 50_000}])
"""What bounds a part: a whole chunk, some points, some rows of the journal, some bytes."""
STAY = ("deleted_run", "stream", "segment_gone")
"""What answers that a run is gone, and what knows for an hour which files were its own."""
TABLES = [table for table in schema.metadata.sorted_tables if "run_id" in table.c and table.name not in STAY]
_run_numbers = itertools.count()


class StoreMachine(RuleBasedStateMachine):
    """One run at a time; the deleted ones before it stay gone."""

    store: Any
    reopen: Any

    def __init__(self):
        super().__init__()
        self.deleted: list[str] = []

    @initialize(world=WORLDS, parts=PARTS, first=st.integers(0, 1))
    def create(self, world, parts, first=1):
        limits = dataclasses.replace(LIMITS, slice_rows=12, delete_rows=40)
        self.limits = self.store.sealing.limits = dataclasses.replace(limits, **parts)
        self.run = NaiveRun(f"law-{next(_run_numbers)}")
        self.world, self.frozen, self.held = world, False, []
        self.horizons = {1: 0.0, 16: 0.0}
        self.ids = itertools.count()
        self.store.runs.create("p", wire.RunCreate(run_id=self.run.run_id), NOW)
        self.begin_attempt(first)
        self.stream_of(0)

    @rule(ranks=st.sampled_from([(0,), (1,), (2,), (0, 1, 2)]), count=st.integers(1, 40), kind=KINDS, order=ORDERS)
    def report(self, ranks, count, kind, order):
        """The next steps of some ranks, each measured and reported whole or in two parts, every third, or none."""
        for stream in {rank % len(self.world): self.stream_of(rank) for rank in ranks}.values():
            first = self.next_of.get(stream.number, self.run.first_steps[-1])
            self.next_of[stream.number] = first + count
            sent = [made for step in range(first, first + count) for made in self.reports_of(stream, step, kind)]
            if order == "descending":
                sent.reverse()
            if order == "some late":
                self.held += [(stream, made) for made in sent[1::3]]
                sent = [made for number, made in enumerate(sent) if number % 3 != 1]
            self.send(stream, sent)

    @rule(count=st.integers(20, 80), sealed=st.booleans())
    def report_much(self, count, sealed):
        """Ranks that keep up with each other, and a server that does."""
        self.report((0, 1, 2), count, "whole", "ascending")
        if sealed:
            self.seal(None, full=True)

    @rule(all_of_them=st.booleans(), which=st.integers(0, 5))
    def report_late(self, all_of_them, which):
        """What was held back comes, and what a client did not hear an answer to comes again."""
        held, self.held = self.held, []
        if not all_of_them:
            held, self.held = held[::2], held[1::2]
        for stream in {made.stream_id: made for made, _ in held}.values():
            self.send(stream, [made for of, made in held if of is stream])
        stream = self.run.streams[which % len(self.run.streams)]
        self.send(stream, list(stream.reports.values()))

    @rule(share=st.integers(1, 2))
    def report_as_another_process(self, share):
        """A second process says that it is rank 0: what the first has told is not told twice."""
        first = self.stream_of(0)
        steps = sorted({made.step for made in first.reports.values() if made.statistics is not None})[::share]
        if steps:
            again = self.begin_stream(0)
            self.send(again, [report(seq, step, rank=7, scalars={"loss": 99.0}) for seq, step in enumerate(steps)])

    @rule(transactions=st.sampled_from([None, None, None, 0, 1, 2, 3, 5, 8, 13]), full=st.booleans())
    def seal(self, transactions, full):
        """Parts are made of what is whole; the server may be killed after any transaction."""
        with killed_after(self.store, transactions):
            while self.store.sealing.seal(self.run.run_id, NOW, journal_full=full):
                pass
            with self.store.reading() as connection:
                view = RunView(connection, self.run.run_id)
                left = connection.execute(select(schema.report.c.stream_id, schema.report.c.seq)).all()
                assert not [report for report in left if view.is_sealed(*report)]

    @rule(back=st.integers(-3, 60), count=st.integers(0, 40), kind=KINDS)
    def resume(self, back, count, kind):
        """Another attempt; it may measure less than it hides, and not at its first step."""
        first = max(1, max(self.run.steps(), default=0) + 1 - back)
        if self.frozen:
            # What hides a part of a frozen point is told elsewhere.
            found = model_points(self.store, self.run.run_id, ["lost"], Selection())
            first = max(first, int(found.steps[found.counts > 1].max(initial=0)) + 1)
        self.begin_attempt(first)
        self.stream_of(0)
        if count:
            self.report((0,), count, kind, "ascending")
        self.read(None, None, None)

    @rule(levels=st.sampled_from([(1,), (1, 16)]), steps=st.sampled_from([32, 64, 10**9]), kill=st.booleans())
    def expire(self, levels, steps, kill):
        """Fine points go, and their sums stay; the server may be killed meanwhile."""
        before = dict.fromkeys(levels, NOW + steps + 0.5)
        self.horizons |= {level: max(moment, self.horizons[level]) for level, moment in before.items()}
        self.frozen |= kill
        with killed_after(self.store, 4 if kill else None):
            self.frozen |= self.store.retention.expire(self.run.run_id, before) > 0

    @rule(finished=st.booleans())
    def restart(self, finished):
        """A server begins anew; maybe over a run that has ended, and is sealed whole once it is silent."""
        type(self).store = self.reopen()
        self.store.sealing.limits = self.limits
        self.sweep()
        if finished:
            finish(self.store, self.run.run_id)
            assert self.run.run_id not in self.store.journal.runs()

    @precondition(lambda self: len(self.run.streams) > 3)
    @rule(world=WORLDS, parts=PARTS)
    def delete(self, world, parts):
        self.delete_for_good()
        purge_all(self.store)
        self.create(world, parts)

    def delete_for_good(self):
        self.store.runs.delete(self.run.run_id, NOW)
        self.deleted.append(self.run.run_id)

    @rule(restarted=st.booleans())
    def delete_and_undo(self, restarted):
        """Gone meanwhile for whoever seals, expires, purges, sweeps, reads or reports; then it is as it was."""
        run_id = self.run.run_id
        before = self.store.runs.get(run_id)
        stream = self.store.streams.stream_record(self.run.streams[-1].stream_id)
        self.store.runs.delete(run_id, NOW, undo_seconds=60.0)
        if restarted:
            self.restart(finished=False)
        for work in (
            lambda: self.store.sealing.seal(run_id, NOW, journal_full=True),
            lambda: model_points(self.store, run_id, None, Selection()),
            lambda: self.store.runs.create("p", wire.RunCreate(run_id=run_id), NOW),
        ):
            with pytest.raises(Gone):
                work()
        with suppress(Gone):
            assert not self.store.retention.expire(run_id, {1: NOW + 1e9, 16: NOW + 1e9})
        assert append(self.store, stream, report(10**6, 10**6)).gone
        self.store.runs.end_undo(NOW + 59)
        purge_all(self.store)
        self.sweep()
        found = self.store.runs.restore(run_id, NOW + 59)
        assert found == msgspec.structs.replace(before, changed_at=NOW + 59)

    @rule(
        points=st.sampled_from([None, None, 1, 2, 4]),
        first=st.sampled_from([None, 1, 20]),
        last=st.sampled_from([None, 40]),
    )
    def read(self, points, first, last):
        """Totals, times, ranks and extremes, of the model and by layer, at any fineness."""
        asked = range(first or 0, (last or 10**6) + 1)
        expected = {step: rows for step, rows in self.run.steps().items() if step in asked}
        if (first or last) and (points or self.frozen):
            return  # Which merged points belong to a part of the steps is the reader's choice.
        chosen = Selection(points=points, first_step=first, last_step=last, extremes_of=(METRIC,) if points else ())
        model = model_points(self.store, self.run.run_id, None, chosen)
        self.compare(model, expected, by_layer=False)
        by_layer = layer_points(self.store, self.run.run_id, None, chosen)
        self.compare(by_layer, expected, by_layer=True)
        if points is None:
            self.check_levels(model)
            self.check_levels(by_layer)
        if points is None and not (self.frozen or first or last):
            self.check_newest(expected)

    @rule(rank=st.integers(0, 2))
    def read_rank_and_scalars(self, rank):
        rank %= len(self.world)
        if not self.frozen and rank in {stream.rank for stream in self.run.streams}:
            found = model_points(self.store, self.run.run_id, None, Selection(rank=rank))
            self.compare(found, self.run.steps(rank), by_layer=False)
        found = scalar_points(self.store, self.run.run_id, None, Selection())
        expected = {name: told for name, told in self.run.scalars().items() if told[0]}
        assert set(found) == set(expected)
        for name, (steps, values) in expected.items():
            assert found[name].steps.tolist() == steps
            np.testing.assert_allclose(found[name].values, values, rtol=1e-12)

    def check_levels(self, found):
        """Points are merged where single steps were old enough to go, and only as far."""
        assert (found.times[found.counts > 1] < self.horizons[1]).all()
        assert (found.times[found.counts > 16] < self.horizons[16]).all()

    def check_newest(self, expected):
        """The newest point is that of one of the steps that are seen; there is one where one is whole."""
        newest = latest_point(self.store, self.run.run_id)
        if newest is None:
            assert not any(len(self.world) == self.run.ranks_at(rows) for rows in expected.values())
            return
        for key, total in self.run.totals(expected[newest.step], by_layer=False).items():
            np.testing.assert_allclose(newest.model.get(key, np.nan), total, rtol=1e-12, err_msg=key)

    def teardown(self):
        if hasattr(self, "run"):
            self.read(None, None, None)
            self.read(1, None, None)
            self.read_rank_and_scalars(0)
            self.send_all_again()
            told = {held.stream_id: held.reports for held in self.store.streams.of_run(self.run.run_id)}
            assert told == {stream.stream_id: len(stream.reports) for stream in self.run.streams}
            self.delete_for_good()
        purge_all(self.store)
        self.sweep()
        for run_id in self.deleted:
            with pytest.raises(Gone):
                model_points(self.store, run_id, None, Selection())
            for table in TABLES:
                assert rows(self.store, table, table.c.run_id == run_id) == 0, table

    def send_all_again(self):
        """All that was ever sent comes again: no reader sees it, and nothing is held that nobody needs."""
        for stream in self.run.streams:
            self.send(stream, list(stream.reports.values()))
        self.seal(None, full=True)
        self.read(None, None, None)
        self.read_rank_and_scalars(0)
        with self.store.reading() as connection:

            def held(*columns):
                mine = columns[0].table.c.run_id == self.run.run_id
                return connection.execute(select(*columns).where(mine)).all()

            sealed = dict(held(schema.run_latest.c.stream_id, schema.run_latest.c.sealed))
            waiting = Counter(stream for stream, _ in held(schema.report.c.stream_id, schema.report.c.seq))
            for stream in self.run.streams:
                ranges = ranges_from_json(sealed.get(stream.stream_id, "[]"))
                count = sum(last - first + 1 for first, last in ranges) + waiting[stream.stream_id]
                assert count == len(stream.reports), "a report is waiting in the journal or sealed, and never both"
            points, *others = (
                {tuple(row) for row in held(*(table.c[name] for name in ("attempt", "level", "chunk", "part")))}
                for table in (schema.point_chunk, schema.model_chunk, schema.layer_chunk)
            )
            assert all(keys <= points for keys in others), "rows that belong to no points"

    def sweep(self):
        """After the hour in which readers may still want them, exactly those files are there that rows name."""
        if (archiving := self.store.archiving) is None:
            return
        archiving.sweep(time.time() + 7200)
        assert {file.path for file in archiving.files.stored()} == paths(self.store)

    def compare(self, found, expected, *, by_layer):
        """Each point is its steps merged: first over shards, then over steps. Nothing is lost or told twice."""
        assert found.counts.sum() == len(expected)
        if not expected:
            return
        steps = np.array(list(expected))
        groups = [
            [expected[step] for step in steps[(steps >= first) & (steps <= last)].tolist()]
            for first, last in zip(found.first_steps, found.steps, strict=True)
        ]
        whole, totals = [len(group) for group in groups] == found.counts.tolist(), found.totals
        if not whole:
            # Late steps stand beside the coarse point in whose range they lie.
            assert (found.counts > 1).any()
            groups = [list(expected.values())]
            totals = {key: values[None] for key, values in reduce_steps(totals).items()}
        single = np.array([len(group) == 1 for group in groups])
        merged = [self.run.over_steps(group, by_layer=by_layer) for group in groups]
        for key in merged[0]:
            total = np.array([of_group[key] for of_group in merged])
            held = totals.get(key, np.full_like(total, np.nan))
            np.testing.assert_allclose(held, total, rtol=1e-12, err_msg=key)
        if not whole:
            return
        assert found.times.tolist() == [max(row.report.time for rows in group for row in rows) for group in groups]
        assert found.ranks.tolist() == [min(map(self.run.ranks_at, group)) for group in groups]
        if not by_layer and METRIC in found.extremes:
            extremes = [self.run.extremes(group, METRIC) for group in groups]
            for held, bound in zip(found.extremes[METRIC], np.transpose(extremes), strict=True):
                np.testing.assert_allclose(held[~single], bound[~single], rtol=1e-12)

    def begin_attempt(self, first_step):
        self.held, self.next_of = [], {}
        self.run.first_steps.append(first_step)
        launch(self.store, len(self.run.first_steps), first_step, run_id=self.run.run_id)
        self.streams = {}

    def begin_stream(self, rank):
        number = next(self.ids)
        made = NaiveStream(f"{self.run.run_id}-{number}", number, len(self.run.first_steps), rank, self.world[rank])
        place = {"rank": rank, "world_size": len(self.world), "replica": made.replica, "process_id": number}
        register(self.store, made.stream_id, self.run.run_id, launch_id=f"launch-{made.attempt}", **place)
        self.run.streams.append(made)
        return made

    def stream_of(self, rank):
        rank %= len(self.world)
        if rank not in self.streams:
            self.streams[rank] = self.begin_stream(rank)
        return self.streams[rank]

    def reports_of(self, stream, step, kind):
        """One report of a step, or one for each part of it. Replicas hold the same numbers; shards their own."""
        scale = self.world[: stream.rank].count(stream.replica) + 3 * stream.attempt
        scalars = {"loss": step + stream.rank + 1000.0 * stream.attempt}
        if kind == "logged" or (kind == "every third" and step % 3):
            return [report(self.next_seq(stream), step, measured=False, scalars=scalars)]
        if kind != "halves" or any(self.world):
            return [report(self.next_seq(stream), step, rank=scale, scalars=scalars)]
        parts = []
        for number, left_out in enumerate(([1, 2], [0])):
            values = block(step, scale)
            values[:, left_out] = np.nan
            logged = {"loss": scalars["loss"] + number / 2, f"part {number}": 1.0 + number}
            part = report(self.next_seq(stream), step, values=values, scalars=logged)
            parts.append(msgspec.structs.replace(part, reports_of_step=2))
        return parts

    def next_seq(self, stream):
        stream.next_seq += 1
        return stream.next_seq

    def send(self, stream, reports):
        """Each seq counts once; totals of steps that are frozen are refused, and nothing else is."""
        known = stream.reports
        record = self.store.streams.stream_record(stream.stream_id)
        outcome = append(self.store, record, *reports)
        fresh = [place for place, made in enumerate(reports) if made.seq not in known]
        frozen = -1 if outcome.frozen_step is None else outcome.frozen_step
        late = [n for n in fresh if reports[n].statistics is not None and reports[n].step <= frozen]
        assert list(outcome.late) == late
        assert self.frozen or not late
        assert (outcome.accepted, outcome.duplicates) == (len(fresh) - len(late), len(reports) - len(fresh))
        known.update({reports[n].seq: reports[n] for n in fresh if n not in late})


@contextmanager
def killed_after(store, transactions):
    """A server that is killed after so many transactions (None: it lives)."""
    if transactions is None:
        yield
        return
    writing, left = store.writing, iter(range(transactions))

    @contextmanager
    def counted():
        if next(left, None) is None:
            raise InterruptedError("killed")
        with writing() as connection:
            yield connection

    with suppress(InterruptedError), mock.patch.object(store, "writing", counted):
        yield


class LawsContract:
    """Subclasses give the fixtures `store` and `reopen`."""

    lives, length = 8, 12
    """By day; at night lives are many and longer."""

    def test_readers_get_what_was_reported(self, store, reopen):
        machine = type("Machine", (StoreMachine,), {"store": store, "reopen": staticmethod(reopen)})
        profile = settings()
        lives, length = (self.lives, self.length) if profile.derandomize else (profile.max_examples // 6, 25)
        bounded = settings(profile, max_examples=lives, stateful_step_count=length)
        run_state_machine_as_test(machine, settings=bounded)
