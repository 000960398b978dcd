"""Steps told in several reports, and two processes on one rank: what counts, and when. Every backend runs these."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from collage_server.store import Selection, schema

from collage_monitor import wire
from tests.server.reads import latest_point, layer_points, model_points
from tests.server.samples import LAYERS, block, layer, report, stream_create
from tests.server.store.contract import NOW
from tests.server.store.ranks import Senders
from tests.server.store.seen import ALL, rows, seal_all, seen, unchanged

__all__ = ["PartsContract"]


class PartsContract(Senders):
    """Subclasses give the fixtures `store` and `reopen`, with the contract's small limits."""

    def part(self, seq, step, columns, of, rank=0):
        values = block(step, rank)
        left = [column for column in range(len(LAYERS)) if column not in columns]
        values[:, left] = np.nan
        return msgspec.structs.replace(report(seq, step, rank=rank, values=values), reports_of_step=of)

    @pytest.mark.parametrize("known", [[3, 3, 3], [2, 3, 3]])
    def test_a_step_is_partial_until_all_its_parts_have_come(self, store, reopen, known):
        """Also where the agent learns only while it sends that there will be more."""
        stream = self.fill(store)
        self.append(store, stream, report(0, 1))
        for seq, of in enumerate(known, 1):
            assert latest_point(store, "r1").step == 1
            self.append(store, stream, self.part(seq, 2, [seq - 1], of))
            points = model_points(store, "r1", ["lost"], ALL)
            assert points.ranks.tolist() == [1, int(seq == 3)]
            assert points.totals["lost"].tolist()[1] == sum(10.0 * (column + 1) for column in range(seq))
        assert latest_point(store, "r1").model["lost"] == 60.0
        assert latest_point(store, "r1").step == latest_point(reopen(), "r1").step == 2

    def test_a_rank_that_has_not_told_all_does_not_count(self, store):
        first, second = self.ranks(store, 2)
        self.send(store, first, [1, 2], 0)
        self.append(store, second, report(0, 1, rank=1), self.part(1, 2, [0, 1], 2, rank=1))
        assert model_points(store, "r1", ["lost"], ALL).ranks.tolist() == [2, 1]
        assert model_points(store, "r1", ["lost"], Selection(rank=1)).ranks.tolist() == [1, 0]
        assert latest_point(store, "r1").step == 1
        self.append(store, second, self.part(2, 2, [2], 2, rank=1))
        assert model_points(store, "r1", ["lost"], ALL).ranks.tolist() == [2, 2]
        assert latest_point(store, "r1").step == 2

    def test_a_partial_step_stays_partial_when_it_is_sealed_and_becomes_whole_later(self, store):
        """Each part is sealed by itself."""
        stream = self.fill(store)
        self.append(store, stream, *(report(seq, seq + 1) for seq in range(40)), self.part(40, 41, [0], 3))
        store.sealing.seal("r1", NOW, journal_full=True)
        seal_all(store)
        self.append(store, stream, *(report(seq + 50, seq + 42) for seq in range(4)))
        for seq, expected in ((41, 0), (42, 1)):
            while store.sealing.seal("r1", NOW, journal_full=True):
                pass
            assert rows(store, schema.report) == 0
            self.append(store, stream, self.part(seq, 41, [seq - 40], 3))
            before = seen(store, ranks=(None, 0))
            assert model_points(store, "r1", ["lost"], ALL).ranks.tolist() == [1] * 40 + [expected] + [1] * 4
            assert model_points(store, "r1", ["lost"], Selection(rank=0)).ranks.tolist()[40] == expected
            while store.sealing.seal("r1", NOW, journal_full=True):
                pass
            unchanged(before, seen(store, ranks=(None, 0)))
        assert model_points(store, "r1", ["lost"], ALL).totals["lost"].tolist() == [60.0] * 45

    def test_late_reports_of_the_rightful_process_join_those_of_the_other_do_not(self, store):
        """Two processes say that they are rank 0; half of each step of the first is sealed, the rest comes late."""
        stream = self.fill(store)
        early, late = self.halves(range(1, 41))
        self.append(store, stream, *early)
        assert seal_all(store) == 1
        store.streams.create_stream("r1", stream_create("again", process_id=99), NOW)
        other = store.streams.stream_record("again")
        self.append(store, stream, *late)
        self.send(store, other, range(1, 41), 3)
        for _ in range(2):
            points = model_points(store, "r1", ["lost"], ALL)
            assert points.totals["lost"].tolist() == [60.0] * 40
            assert points.ranks.tolist() == [1] * 40
            assert layer_points(store, "r1", ["lost"], ALL).totals["lost"].tolist() == [[10.0, 20.0, 30.0]] * 40
            store.runs.update("r1", wire.RunUpdate(state="finished"), NOW)
            seal_all(store)
        assert rows(store, schema.report) == 0

    def test_another_process_of_a_rank_does_not_blank_what_the_rightful_one_holds(self, store):
        """It says that it holds other replicas: what is sealed of the rank is the first one's all the same."""
        first, second = self.ranks(store, 2, replica=lambda rank: rank)
        self.send(store, first, range(1, 41), 0)
        seal_all(store)
        again = stream_create("again", process_id=99, layers=[layer(name, 1) for name in LAYERS], world_size=2)
        store.streams.create_stream("r1", again, NOW)
        self.send(store, second, range(1, 41), 1)
        for _ in range(2):
            assert model_points(store, "r1", ["lost"], ALL).totals["lost"].tolist() == [60.0] * 40
            store.runs.update("r1", wire.RunUpdate(state="finished"), NOW)
            seal_all(store)

    def halves(self, steps):
        """Of each step two reports: of the last two layers, and of the first one."""
        told: list[list[wire.Report]] = [[], []]
        for number, columns in enumerate(([1, 2], [0])):
            for i, step in enumerate(steps):
                told[number].append(self.part(number * len(steps) + i, step, columns, 1))
        return told
