"""Steps told in several reports, and two processes on one rank: what counts, and when. Every backend runs these."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from collage_monitor import wire
from tests.server.reads import latest_point, model_points
from tests.server.samples import LAYERS, block, layer, report, stream_create
from tests.server.store.contract import NOW
from tests.server.store.ranks import Senders
from tests.server.store.seen import ALL, seal_all

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
