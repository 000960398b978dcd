"""The PostgreSQL cluster and the object store of the session; a fresh migrated database, a fresh bucket a test."""

import itertools
import tempfile
from pathlib import Path

import psycopg
import pytest
from collage_server.store import PostgresqlStore

from tests.server.store.postgresql import Cluster, programs_or_skip
from tests.server.store.seaweed import ObjectStore, program_or_skip
from tests.server.store.sending import fill

HERE = Path(__file__).parent
_numbers = itertools.count()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """What needs a cluster or an object store is slow, here."""
    for item in items:
        if item.path.parent == HERE and {"cluster", "object_store"} & {*getattr(item, "fixturenames", ())}:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def cluster():
    """A running cluster with a migrated template database."""
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(folder, programs_or_skip())
        with cluster.running():
            cluster.execute("CREATE DATABASE migrated")
            PostgresqlStore(cluster.url("migrated"), stale_after_seconds=600.0).migrate()
            yield cluster


@pytest.fixture(scope="session")
def execute(cluster):
    """Runs a statement on one connection for all tests: psql takes longer to start."""
    with psycopg.connect(cluster.url("postgres"), autocommit=True) as connection:
        yield connection.execute


def _made(cluster, execute, more=""):
    name = f"test_{next(_numbers)}"
    execute(f"CREATE DATABASE {name} {more}")
    yield cluster.url(name)
    execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def database(cluster, execute):
    """The URL of a fresh database with this server's schema."""
    yield from _made(cluster, execute, "TEMPLATE migrated STRATEGY file_copy")


@pytest.fixture
def empty_database(cluster, execute):
    """The URL of a database without tables."""
    yield from _made(cluster, execute)


@pytest.fixture
def stream(store):
    """The stream of a run that has begun."""
    return fill(store)


@pytest.fixture(scope="session")
def object_store(tmp_path_factory):
    """A running object store. It takes seconds to start, so a worker has one."""
    store = ObjectStore(tmp_path_factory.mktemp("objects"), program_or_skip())
    try:
        store.start()
        yield store
    finally:
        store.kill()


@pytest.fixture
def bucket(object_store, monkeypatch):
    """The URL of an empty bucket; what opens it is in the environment."""
    for name, value in object_store.environment.items():
        monkeypatch.setenv(name, value)
    url = object_store.new_bucket()
    yield url
    object_store.remove_bucket(url)
