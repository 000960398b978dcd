"""PostgreSQL under the contract, and what only PostgreSQL has: several servers, partitions, refused clusters."""

import contextlib
import itertools
import logging
import shutil
import subprocess
import tempfile
import threading

import numpy as np
import pytest
from collage_server.clock import DatabaseClock
from collage_server.errors import Busy, Gone, StoreUnusable, Unprocessable
from collage_server.store import PostgresqlStore, schema
from sqlalchemy import event, text

from collage_monitor import wire
from tests.server.reads import due_runs, latest_point, model_points
from tests.server.samples import LAYERS, STATISTICS, report
from tests.server.store.access_contract import AccessContract
from tests.server.store.contract import StoreContract
from tests.server.store.events import EventsContract
from tests.server.store.incidents import IncidentsContract
from tests.server.store.laws import LawsContract
from tests.server.store.life import LifeContract
from tests.server.store.postgresql import SETTINGS, Cluster, programs_or_skip
from tests.server.store.ranks import PartsContract, RanksContract, ReplicasContract
from tests.server.store.sealing import KilledContract, SealedContract, SealingContract
from tests.server.store.second_writers import SecondWritersContract
from tests.server.store.seen import seen, unchanged
from tests.server.store.sending import append, fill, launch, send
from tests.server.store.stores import ALL, NOW, opened, reopening, rows, seal_all
from tests.waiting import PATIENCE_SECONDS, at_once, beside, until

pytestmark = pytest.mark.slow
END = "pg_terminate_backend(pid)"


@pytest.fixture
def store(database):
    with contextlib.closing(opened(database)) as store:
        yield store


@pytest.fixture
def reopen(store, database):
    yield from reopening(store, lambda: opened(database))


@pytest.fixture
def other(database):
    """Another server on the same database."""
    with contextlib.closing(opened(database)) as other:
        yield other


class TestPostgresql(
    StoreContract, AccessContract, SealingContract, EventsContract, IncidentsContract, LifeContract
):
    """The contract on PostgreSQL; parts and sealed runs there by day, too: in `test_archived`."""


@pytest.mark.nightly
class TestPostgresqlRest(
    KilledContract, SealedContract, PartsContract, RanksContract, ReplicasContract, SecondWritersContract
):
    """What is merged of what was read, which is the same code on every database."""


class TestPostgresqlLaws(LawsContract):
    """The store's life on PostgreSQL."""

    lives = 3


def test_chunks_are_partitioned_by_run_and_blocks_stored_as_they_are(store):
    of_tables = text("SELECT partrelid::regclass::text, partstrat FROM pg_partitioned_table")
    of_data = "SELECT attstorage FROM pg_attribute WHERE attrelid = 'layer_chunk_3'::regclass AND attname = 'data'"
    with store.engine.connect() as connection:
        strategies = dict(connection.execute(of_tables).all())
        assert connection.execute(text(of_data)).scalar() == "e"
    assert strategies == dict.fromkeys(("point_chunk", "model_chunk", "layer_chunk", "scalar_chunk"), "h")


def test_an_empty_database_is_refused_until_it_is_migrated_by_several_servers_at_once(empty_database):
    with pytest.raises(StoreUnusable, match="collage-monitor setup database"):
        opened(empty_database)
    servers = [PostgresqlStore(empty_database, stale_after_seconds=600.0) for _ in range(4)]
    at_once(*[server.migrate for server in servers])
    servers[0].migrate()
    opened(empty_database).close()


def test_a_row_that_an_older_server_changes_beside_this_one_is_not_taken_for_damaged(store):
    """It goes on while the schema gets checksums, and it knows none: what it changes has none either."""
    held = {table.name for table in schema.metadata.sorted_tables if "checks" in table.c} - {"numbered_export"}
    columns = [(name, "checks") for name in sorted(held)]
    columns += [("deleted_run", name) for name in ("kept_until", "kept")]
    columns += [("report", "step_check"), *(("segment", name) for name in ("digest", "checked_at", "problem"))]
    with store.engine.begin() as connection:
        for table, column in columns:
            connection.execute(text(f"ALTER TABLE {table} DROP COLUMN {column}"))
        connection.execute(text("DROP TABLE numbered_export"))
        connection.execute(text("UPDATE alembic_version SET version_num = 'r0011'"))
    store.migrate()
    append(store, fill(store), report(0, 1))
    with store.engine.begin() as connection:
        asked = text("SELECT checks FROM run_latest")
        assert connection.execute(asked).scalar_one() is not None
        connection.execute(text("UPDATE run_latest SET last_step = 7"))
        assert connection.execute(asked).scalar_one() is None
    [latest] = store.streams.of_run("r1")
    assert (latest.reports, latest.last_step) == (1, 7)


def test_a_wrong_address_is_a_sentence():
    with pytest.raises(StoreUnusable, match="does not answer"):
        opened("postgresql://nobody@/none?host=/nonexistent")
    addresses = ("//u:hush@host:port/db", "//u:pass@part:hush@/db", "//u:hush@/db?no_option=1")
    for wrong in ("no url at all", *(f"postgresql:{address}" for address in addresses)):
        with pytest.raises(StoreUnusable, match="URL cannot be used") as raised:
            opened(wrong)
        assert "hush" not in str(raised.value)


def test_text_that_it_cannot_hold_is_refused(store):
    with pytest.raises(Unprocessable):
        store.runs.create("p", wire.RunCreate(run_id="r1", name="a\0b"), NOW)


def test_a_cluster_that_may_lose_what_it_acknowledged_is_refused():
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(folder, programs_or_skip(), ("listen_addresses=", "shared_buffers=16MB", "fsync=off"))
        with cluster.running():
            url = cluster.url("postgres")
            with pytest.raises(StoreUnusable, match="fsync = off"):
                opened(url)
            PostgresqlStore(url, stale_after_seconds=600.0, unsafe=True).migrate()
            opened(url, unsafe=True).close()


def test_so_is_a_database_that_does_not_wait_for_its_log(database, execute):
    execute(f"ALTER DATABASE {database.partition('@/')[2].partition('?')[0]} SET synchronous_commit = off")
    with pytest.raises(StoreUnusable, match="synchronous_commit = off"):
        opened(database)


def test_two_servers_take_the_same_reports_and_store_each_once(store, stream, other):

    def sent(server, order):
        return sum(append(server, stream, report(seq, seq + 1)).accepted for seq in order)

    accepted = at_once(lambda: sent(store, range(60)), lambda: sent(other, range(59, -1, -1)))
    assert sum(accepted) == 60
    for server in (store, other):
        [known] = server.streams.of_run("r1")
        assert (known.reports, known.last_seq, known.last_step) == (60, 59, 60)
        assert latest_point(server, "r1").step == 60
        assert server.runs.get("r1").scalars["loss"].step == 60
    unchanged(seen(store), seen(other))


def test_two_servers_creating_the_same_things_make_one_of_each(store, other):
    def create(server, own):
        for i in range(10):
            server.runs.create("p", wire.RunCreate(run_id=f"r{i}"), NOW)
            for number in (own, "shared"):
                launch(server, number, 1, run_id=f"r{i}")

    at_once(lambda: create(store, "0"), lambda: create(other, "1"))
    for i in range(10):
        assert [attempt.attempt for attempt in store.runs.get(f"r{i}").attempts] == [1, 2, 3]


def test_two_servers_that_evaluate_a_run_at_once_keep_one_overview(store, other):
    fill(store)
    assert due_runs(store)
    record, together = store.runs.get("r1"), threading.Barrier(2, timeout=PATIENCE_SECONDS)

    def put(server):
        for _ in range(50):
            together.wait()
            server.summaries.put(record, wire.Overview(run_id="r1", headline="as it is"))

    at_once(lambda: put(store), lambda: put(other))
    assert store.summaries.overview("r1").headline == "as it is"


def test_only_one_server_seals_a_run_at_a_time(store, other):
    send(store, fill(store), range(1, 41))
    with store._claim("r1") as mine:
        assert mine
        assert not other.sealing.seal("r1", NOW)
    assert other.sealing.seal("r1", NOW)


def test_a_sealer_that_loses_its_claim_makes_nothing_visible(store, other, cluster, monkeypatch):
    """Another server may have begun to seal the same reports."""
    send(store, fill(store), range(1, 41))
    before = seen(store)
    writing = store.writing

    @contextlib.contextmanager
    def cut():
        with writing() as connection:
            yield connection
        cluster.execute(f"SELECT {END} FROM pg_stat_activity WHERE state = 'idle in transaction'")

    with monkeypatch.context() as broken:
        broken.setattr(store, "writing", cut)
        with pytest.raises(Busy):
            store.sealing.seal("r1", NOW)
    assert rows(store, schema.point_chunk) == 0
    assert seal_all(other) == 1
    unchanged(before, seen(store))


def test_a_claim_outlasts_the_time_that_a_transaction_may_idle(store, other, cluster):
    fill(store)
    cluster.execute(f"ALTER DATABASE {store.engine.url.database} SET idle_in_transaction_session_timeout = '1s'")
    other.engine.dispose()
    with other._claim("r1") as mine, other.engine.connect() as later:
        assert mine
        later.execute(text("SELECT 1"))
        process_id = later.connection.driver_connection.info.backend_pid
        left = f"SELECT count(*) FROM pg_stat_activity WHERE pid = {process_id}"
        until(lambda: cluster.execute(left) == "0", "the end of a transaction that began to idle after the claim")
        later.invalidate()
        with store._claim("r1") as theirs:
            assert not theirs
        other._require_claim()


def test_a_session_that_only_reads_is_let_go(store, stream, cluster, caplog):
    """Another server has taken over, and this one came back to its address: told to come later, not a failure.

    The database's own words, which may name hosts, are for the log.
    """
    database = store.engine.url.database
    for wrong in (lambda: append(store, stream, report(0, 1)), lambda: launch(store, 2, 1)):
        cluster.execute(f"ALTER DATABASE {database} SET default_transaction_read_only = on")
        store.engine.dispose()
        caplog.clear()
        with pytest.raises(Busy, match=r"cannot do this now; send this again later$"):
            wrong()
        assert "read-only" in caplog.text
        cluster.execute(f"ALTER DATABASE {database} RESET default_transaction_read_only")
        wrong()


def test_a_run_can_be_deleted_while_another_server_seals_it(store, other):
    """The sealer holds its claim and then wants the run; the deletion holds the run: it must not want the claim."""
    fill(store)
    with store._claim("r1"):
        other.runs.delete("r1", NOW)
    with pytest.raises(Gone):
        store.sealing.seal("r1", NOW)


def test_servers_sealing_and_taking_reports_at_once_lose_nothing(store, stream, other):
    with beside(lambda: store.sealing.seal("r1", NOW)), beside(lambda: other.sealing.seal("r1", NOW)):
        for start in range(0, 200, 10):
            send(store if start % 20 else other, stream, range(start + 1, start + 11), first_seq=start)
    seal_all(store)
    assert store.streams.of_run("r1")[0].reports == 200
    assert model_points(store, "r1", ["lost"], ALL).steps.tolist() == list(range(1, 201))
    again = send(other, stream, range(1, 201))
    assert (again.accepted, again.duplicates) == (0, 200)


def test_a_commit_that_finds_its_connection_lost_gives_up_the_idle_ones_too(store, stream, cluster, caplog):
    connections = [store.engine.connect() for _ in range(4)]
    database = connections[0].scalar(text("SELECT current_database()"))
    for connection in connections:
        connection.close()
    lost = cluster.execute(f"SELECT count({END}) FROM pg_stat_activity WHERE datname = '{database}'")
    assert int(lost) >= 4
    with pytest.raises(Busy, match=r"cannot do this now; send this again later$"):
        append(store, stream, report(0, 1))
    assert "terminat" in caplog.text
    assert append(store, stream, report(0, 1)).accepted == 1


def test_a_connection_that_nobody_answers_is_given_up_soon_unless_the_address_says_otherwise(database):
    for address, seconds in ((database, 30), (f"{database}&tcp_user_timeout=5000", 5)):
        store = opened(address)
        with store.engine.connect() as connection:
            known = connection.connection.driver_connection.info.get_parameters()
        assert known["tcp_user_timeout"] == str(1000 * seconds)
        assert int(known["keepalives_idle"]) + 3 * int(known["keepalives_interval"]) <= 60
        store.close()


def test_reports_are_taken_in_two_round_trips(store, stream, tmp_path):
    append(store, stream, report(0, 1))
    with (tmp_path / "trace").open("w+") as trace:
        event.listen(store.engine, "checkout", lambda driver, *_: driver.pgconn.trace(trace.fileno()))
        send(store, stream, range(2, 12), first_seq=1)
        with store.engine.connect() as connection:
            connection.connection.dbapi_connection.pgconn.untrace()
        trace.seek(0)
        sides = [line.split("\t")[1] for line in trace if line.count("\t") > 2]
    assert [side for side, _ in itertools.groupby(sides)] == ["F", "B"] * 2


def test_the_emptied_journal_s_space_is_used_again(store):
    """Whenever autovacuum comes round: what is sealed would else take its space twice, and a third time."""
    with store.writing() as connection:
        connection.execute(text("ALTER TABLE report SET (autovacuum_enabled = off)"))
    stream = fill(store)
    values = np.random.default_rng(0).random((len(STATISTICS), len(LAYERS)))
    sizes = []
    for start in range(0, 4 * 160, 160):
        send(store, stream, range(start + 1, start + 161), first_seq=start, values=values)
        assert seal_all(store)
        assert not store.journal.runs()
        store.release_space()
        with store.reading() as connection:
            sizes.append(connection.execute(text("SELECT pg_total_relation_size('report')")).scalar_one())
    assert max(sizes[2:]) <= sizes[1], sizes


def test_a_cluster_that_recovers_is_waited_for(caplog):
    """A standby that takes no connections until it is promoted answers as one does that replays its log."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        cluster = Cluster(folder, programs_or_skip())
        url = cluster.url("postgres")
        with cluster.running():
            PostgresqlStore(url, stale_after_seconds=600.0).migrate()
        signal_file = cluster.folder / "data" / "standby.signal"
        signal_file.touch()
        shutil.chown(signal_file, cluster.user)
        cluster.settings = (*SETTINGS, "hot_standby=off")
        cluster.start(until_ready=False)
        opening = threading.Thread(target=lambda: opened(url).close(), daemon=True)
        with caplog.at_level(logging.WARNING):
            opening.start()
            until(lambda: "PostgreSQL starts or recovers" in caplog.text, "the server to wait for PostgreSQL")
            assert opening.is_alive()
            cluster.promote()
            opening.join(PATIENCE_SECONDS)
            assert not opening.is_alive()
        assert caplog.text.count("this server waits for it") == 1
        cluster.stop()


def test_what_is_stored_is_dated_by_the_clock_of_the_database(store):
    """A server whose machine's clock is days off asks the database instead."""
    clock = DatabaseClock(store, own=lambda: NOW)
    assert clock() == NOW
    clock.follow()
    theirs = store.own_time()
    assert abs(theirs - clock()) < PATIENCE_SECONDS
    assert abs(clock() - NOW) > 86_400


def test_a_dump_taken_while_a_server_serves_is_restored_into_an_empty_database(
    cluster, store, database, empty_database, tmp_path
):
    """By the documented commands; what came after the dump began is lost, its sender repeats it."""
    stream = fill(store)
    send(store, stream, range(1, 81))
    assert seal_all(store) == 2
    before = seen(store)
    dump = [cluster.programs / "pg_dump", "--format=custom", f"--file={tmp_path / 'dump'}", database]
    subprocess.run(dump, check=True, capture_output=True)
    send(store, stream, [81], first_seq=80)
    restore = [cluster.programs / "pg_restore", f"--dbname={empty_database}", tmp_path / "dump"]
    subprocess.run(restore, check=True, capture_output=True)
    with contextlib.closing(opened(empty_database)) as again:
        unchanged(before, seen(again))
        outcome = send(again, stream, range(71, 82), first_seq=70)
        assert (outcome.accepted, outcome.duplicates) == (1, 10)
        assert again.runs.get("r1").last_step == 81
