"""Who reports: ids of a single process, of the ranks of one launch, and of its restarts."""

import os
import re
import textwrap
import threading

import pytest
import torch
from collage_agent.launch.identity import agree, make_identity

from collage_monitor.wire import AttemptCreate, RunCreate, StreamCreate
from tests.agent_delivery.doubles import arrived, of_kind
from tests.forking import TRAINING, fork, run_forked
from tests.ports import free_port
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.slow

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def rank(number, nth_run=0, **environment):
    return make_identity(None, nth_run=nth_run, environment={**TORCHRUN, "RANK": str(number), **environment})


def alone(run_id=None, **options):
    return make_identity(run_id, environment={}, **options)


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        (alone(), alone(), []),
        (alone("run"), alone("run"), ["run_id"]),
        (rank(0), rank(1), ["run_id", "launch_id"]),
        (rank(0), rank(0, TORCHELASTIC_RESTART_COUNT="1"), ["run_id"]),
        (rank(0), rank(0, nth_run=1), []),
    ],
    ids=["each by itself", "a given run", "ranks of a launch", "a restart", "a second run in the same processes"],
)
def test_whose_ids_are_the_same(one, other, shared):
    ids = ("run_id", "launch_id", "stream_id")
    assert [name for name in ids if getattr(one, name) == getattr(other, name)] == shared


def test_a_process_knows_its_place():
    one, second = alone(), rank(1)
    assert (one.rank, one.world_size, one.process_id, one.is_first_rank) == (0, 1, os.getpid(), True)
    assert (second.rank, second.world_size, second.process_id, second.is_first_rank) == (1, 2, os.getpid(), False)
    assert re.fullmatch("[0-9A-Z]{26}", second.run_id)
    assert alone("run").run_id == "run"


def test_the_launchers_id_is_the_runs():
    assert rank(1, TORCHELASTIC_RUN_ID="job-17").run_id == "job-17"
    assert rank(1, TORCHELASTIC_RUN_ID="job 17/a").run_id == "job-17-a"
    assert len(rank(1, TORCHELASTIC_RUN_ID="x" * 200).run_id) <= 64


@pytest.mark.parametrize(
    ("environment", "place", "told"),
    [
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "n"}, (1, 4), "COLLAGE_RUN_ID"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, (0, 1), "make no sense"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, (0, 1), "make no sense"),
    ],
)
def test_ranks_that_share_nothing_are_told_what_to_set(environment, place, told, caplog):
    identity = make_identity(None, environment=environment)
    assert (identity.rank, identity.world_size) == place
    assert told in caplog.text


MACHINES = """
import sys, torch.distributed as distributed
from collage_agent.launch.identity import make_identity
if sys.argv[1] == "after":
    distributed.init_process_group("gloo")
identity = make_identity(None)
again = make_identity(None, nth_run=1)
print(identity.rank, identity.run_id, identity.launch_id, again.run_id, again.launch_id)
if sys.argv[1] == "after":
    distributed.barrier()
    distributed.destroy_process_group()
"""


def identities_on_two_machines(when):
    """What two processes print that believe to be on different machines."""
    port = str(free_port())
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.2", "MASTER_PORT": port}
    ranks = [{**os.environ, **shared, "RANK": str(number)} for number in range(2)]
    processes = [fork(TRAINING, "-c", MACHINES, when, environment=environment) for environment in ranks]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    return [output.split()[1:] for output in outputs]


def test_ranks_on_several_machines_agree_through_the_process_groups_store():
    zero, one = identities_on_two_machines("after")
    assert zero == one
    assert len(set(zero)) == 4
    # A second launch with the same settings is another one, of another run.
    assert set(identities_on_two_machines("after")[0]).isdisjoint(zero)


def test_before_the_process_group_there_is_nothing_to_agree_through():
    zero, one = identities_on_two_machines("before")
    assert zero[0] != one[0]


def test_a_store_that_does_not_answer_is_left_alone(monkeypatch):
    released = threading.Event()

    class Silent:
        def clone(self):
            return self

        def compare_set(self, key, expected, desired):
            released.wait(PATIENCE_SECONDS)
            return b"late"

    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", Silent)
    assert agree("key", "mine", {}, seconds=0.2) is None
    released.set()


def test_a_store_that_fails_is_named(monkeypatch, caplog):
    assert agree("key", "mine", {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "x"}) is None
    assert "store was asked" in caplog.text


def test_the_first_proposal_wins(monkeypatch):
    store = torch.distributed.HashStore()
    monkeypatch.setattr("collage_agent.launch.identity._store", lambda environment, seconds: store)
    assert [agree("key", word, {}) for word in ("first", "second")] == ["first", "first"]
    assert agree("other", "third", {}) == "third"


def test_two_processes_under_torchrun_report_to_one_run(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
            import torch, torch.distributed, collage_agent as collage
            torch.distributed.init_process_group("gloo")
            collage.init(mode="offline")
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            collage.watch(model, optimizer, every=1, budget=None)
            for _ in range(3):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
            collage.finish()
            torch.distributed.destroy_process_group()
        """)
    )
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-addr", "127.0.0.1"]
    environment = {**os.environ, "COLLAGE_DIR": str(tmp_path / "data"), "OMP_NUM_THREADS": "1"}
    result = run_forked(TRAINING, *launcher, "--master-port", free_port(), script, environment=environment)
    assert result.returncode == 0, result.stderr
    transport = arrived(tmp_path / "data")
    assert len({body.run_id for body in of_kind(transport, RunCreate)}) == 1
    assert len({(body.launch_id, body.first_step) for body in of_kind(transport, AttemptCreate)}) == 1
    streams = {(body.rank, body.world_size, body.stream_id) for body in of_kind(transport, StreamCreate)}
    assert sorted(stream[:2] for stream in streams) == [(0, 2), (1, 2)]
