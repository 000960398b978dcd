"""The fault table of docs/delivery.md: a real training process, disturbed in every way, trains on unchanged."""

import contextlib
import os
import signal
import subprocess

import pytest

from tests.agent_delivery.doubles import ServerDouble
from tests.end_to_end.trainings import start_training, train
from tests.forking import TRAINING, fork, run_command
from tests.parallel.launch import told_to_all
from tests.ports import free_port
from tests.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def undisturbed():
    """What the same training without the agent comes to."""
    return train("--unwatched").result["weights"]


@pytest.fixture
def double():
    """A server that can be told to misbehave."""
    server = ServerDouble()
    yield server
    server.close()


@contextlib.contextmanager
def mounted(folder, options):
    """A small file system of its own at `folder`; None where this user may not mount one."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, check=False
    )
    try:
        yield folder if done.returncode == 0 else None
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", str(folder)], check=True)


def unharmed(outcome, undisturbed):
    """Whether the training ended as it does without the agent, and no error came out of it."""
    assert outcome.status == 0, outcome.errors
    assert "Traceback" not in outcome.errors, outcome.errors
    return outcome.result["weights"] == undisturbed


def replay(url, folder):
    return run_command(TRAINING, "sync", "--server-url", url, "--dir", folder)


def test_a_server_absent_from_the_start(server, client, undisturbed):
    outcome = train(server_url=f"http://127.0.0.1:{free_port()}", dir=server.folder, run_id="absent")
    assert unharmed(outcome, undisturbed)
    assert (outcome.result["sent"], outcome.result["spooled"], outcome.result["dropped"]) == (0, 40, {})
    sent = replay(server.url, server.folder)
    assert sent.returncode == 0, sent.stderr
    assert "40 reports sent" in sent.stdout
    assert client.series("absent", "loss", points=1000).steps == list(range(1, 41))
    assert client.run("absent").state == "finished"
    assert "nothing waits" in replay(server.url, server.folder).stdout


@pytest.mark.parametrize(
    "trouble", [503, "cut", *(pytest.param(at, marks=pytest.mark.nightly) for at in (429, 500, "garbage", "hang"))]
)
def test_a_server_in_trouble(double, tmp_path, undisturbed, trouble):
    double.script = [trouble, None, None, None, None, trouble]
    outcome = train(server_url=double.url, dir=tmp_path, token="t")
    assert unharmed(outcome, undisturbed)
    assert (outcome.result["sent"] + outcome.result["spooled"], outcome.result["dropped"]) == (40, {})
    # A server that hangs for as long as the end of the run may take gets the rest later.
    assert trouble == "hang" or outcome.result["spooled"] == 0
    assert replay(double.url, tmp_path).returncode == 0
    assert sorted(double.steps()) == list(range(1, 41))
    assert list(tmp_path.glob("spool/*")) == []


@pytest.mark.parametrize(("options", "own_bytes"), [("size=32k", 16_384), ("ro,size=64k", None)])
def test_a_folder_that_takes_little_or_nothing(tmp_path, undisturbed, options, own_bytes):
    absent, place = f"http://127.0.0.1:{free_port()}", tmp_path / "folder"
    with mounted(place, options) as folder:
        # Where nothing may be mounted, a bound on the length of files stands in, and a folder without rights.
        bound = ["--file-bytes", own_bytes] if own_bytes and folder is None else []
        if folder is None and not own_bytes:
            os.chmod(place, 0o500)
        outcome = train(*bound, server_url=absent, dir=place)
    assert unharmed(outcome, undisturbed)
    assert outcome.result["dropped"].keys() == {"spool_failed"}
    assert outcome.result["spooled"] + outcome.result["dropped"]["spool_failed"] >= 40
    assert own_bytes or (outcome.result["sent"], outcome.result["spooled"]) == (0, 0)
    assert "cannot be kept" in outcome.errors


def test_kill_of_the_trainer_and_its_resumption_from_a_checkpoint(server, client, tmp_path, undisturbed):
    settings = {"server_url": server.url, "dir": server.folder, "run_id": "resumed"}
    checkpoint = tmp_path / "checkpoint.pt"
    killed = start_training("--checkpoint", checkpoint, "--hold-at", 30, **settings)
    assert killed.stdout is not None
    assert "step 30\n" in iter(killed.stdout.readline, "")
    until(lambda: (client.run("resumed").last_step or 0) >= 25, "step 25 at the server")
    killed.kill()
    killed.communicate()
    assert killed.returncode == -9
    before = client.series("resumed", "loss", points=1000)
    outcome = train("--checkpoint", checkpoint, **settings)
    assert unharmed(outcome, undisturbed)
    attempts = client.run("resumed").attempts
    assert [(attempt.attempt, attempt.first_step) for attempt in attempts] == [(1, 1), (2, 21)]
    loss = client.series("resumed", "loss", points=1000)
    assert before.steps == list(range(1, before.steps[-1] + 1))
    assert before.steps[-1] >= 25
    assert loss.steps == list(range(1, 41))
    assert loss.values[:20] == before.values[:20]
    first, second = client.streams("resumed").streams
    assert (first.reports >= 25, second.reports) == (True, 20)
    assert client.series("resumed", "edq_ratio", points=1000).steps == list(range(1, 41))
    merged = client.compare(["resumed"], "edq_ratio").runs[0].merged
    assert merged["sampled"] == 40 * (8 * 32 + 32 + 32 * 4 + 4)


def test_a_queue_that_overflows(double, tmp_path):
    double.always = "hang"
    process = start_training("--extra-scalars", 25_000, server_url=double.url, dir=tmp_path, token="t")
    assert process.stdout is not None
    assert "all logged\n" in iter(process.stdout.readline, "")
    double.always = None
    output, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, errors
    assert '"queue_full"' in output
    assert replay(double.url, tmp_path).returncode == 0
    stored = [report for reports in double.stored.values() for report in reports.values()]
    told = max(report.scalars.get("reports_dropped", 0.0) for report in stored)
    assert told > 3000
    with_values = {report.step for report in stored if report.scalars.keys() & {"extra", "loss"}}
    # What is measured and logged of one step counts once.
    assert len(with_values) + told == 40 + 25_000
    assert max(with_values) == 25_040


def test_nan_and_infinity_everywhere(server, client):
    alone = train("--unwatched", "--poison-from", 11).result["weights"]
    settings = {"server_url": server.url, "dir": server.folder, "run_id": "poisoned"}
    outcome = train("--poison-from", 11, **settings)
    assert unharmed(outcome, alone)
    assert outcome.result["dropped"] == {}
    loss = client.series("poisoned", "loss", points=1000)
    assert loss.steps == list(range(1, 41))
    assert all(isinstance(value, float) for value in loss.values[:11])
    assert set(loss.values[11:]) == {"NaN"}
    nonfinite = client.series("poisoned", "nonfinite_grads", points=1000)
    assert nonfinite.steps == list(range(1, 41))
    assert nonfinite.values[:10] == [0.0] * 10
    assert all(value not in {None, 0.0} for value in nonfinite.values[10:])


RANKS = """
import os, signal, sys, time, torch, torch.distributed as distributed
from pathlib import Path
import collage_agent as collage
from collage_monitor.client import Client
from collage_monitor.local import read_token
distributed.init_process_group("gloo")
rank, world_size = distributed.get_rank(), distributed.get_world_size()
trouble = sys.argv[1]
if trouble == "slow" and rank == world_size - 1:
    os.environ["COLLAGE_SERVER_URL"] = sys.argv[2]
collage.init(run_id="ranks")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
collage.watch(model, optimizer, every=1, budget=None)
for step in range(1, 21):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    collage.log({"loss": 1.0})
    if trouble == "dead" and step == 15:
        with Client(os.environ["COLLAGE_SERVER_URL"], read_token(Path(os.environ["COLLAGE_DIR"]))) as client:
            while (rank, 15) not in {(s.rank, s.last_step) for s in client.streams("ranks").streams}:
                time.sleep(0.05)
        if rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
run = collage.current_run()
if rank < world_size - 1:
    collage.finish()
    print("finished with", run.reports_spooled, "waiting and", run.reports_dropped, "given up", flush=True)
else:
    print("trained with", run.reports_sent, "taken", flush=True)
distributed.barrier()
distributed.destroy_process_group()
"""


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("trouble", ["slow", "dead"])
def test_a_rank_in_trouble_holds_up_no_other(server, client, double, tmp_path, world_size, trouble):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    double.always = "hang"
    settings = {"COLLAGE_SERVER_URL": server.url, "COLLAGE_DIR": str(server.folder), "OMP_NUM_THREADS": "1"}
    shared = {**os.environ, **settings, **told_to_all(world_size)}
    ranks = [
        fork(TRAINING, script, trouble, double.url, environment={**shared, "RANK": str(n), "LOCAL_RANK": str(n)})
        for n in range(world_size)
    ]
    healthy = range(world_size - 1)
    if trouble == "dead":
        ranks[-1].wait()
        # As torchrun ends the others where one has failed.
        for rank in healthy:
            ranks[rank].terminate()
    told = [rank.communicate() for rank in ranks]
    assert ranks[-1].returncode == (0 if trouble == "slow" else -signal.SIGKILL), told
    if trouble == "slow":
        assert [rank.returncode for rank in ranks] == [0] * world_size, told
        assert all("finished with 0 waiting and {} given up" in told[rank][0] for rank in healthy)
        # The rank in trouble reached the end of its training before its server took anything.
        assert "trained with 0 taken" in told[-1][0]
        assert double.steps() == []
    replay(server.url, server.folder)
    streams = {stream.rank: stream for stream in client.streams("ranks").streams}
    for rank in healthy:
        assert streams[rank].last_step == (20 if trouble == "slow" else 15)
        assert streams[rank].last_seq == streams[rank].reports - 1
    assert trouble == "slow" or streams[world_size - 1].last_step == 15
