"""A kept connection stands beside the pool, serves one at a time, and does not outlive an error."""

from __future__ import annotations

import pytest
from collage_server.store.engine.kept import KeptConnection
from sqlalchemy import create_engine, text


@pytest.fixture
def engine(tmp_path):
    engine = create_engine(f"sqlite:///{tmp_path / 'kept.sqlite'}", pool_size=1, max_overflow=0, pool_timeout=0.1)
    yield engine
    engine.dispose()


def raw(connection):
    return connection.connection.dbapi_connection


def test_it_is_the_same_one_and_takes_none_of_the_pools(engine):
    kept = KeptConnection(begin="IMMEDIATE")
    with kept.held(engine) as connection:
        first = raw(connection)
        assert connection.get_execution_options()["begin"] == "IMMEDIATE"
        assert engine.pool.checkedout() == 0
        with engine.connect() as other:
            assert raw(other) is not first
    with kept.held(engine) as connection:
        assert raw(connection) is first
    kept.close()
    with pytest.raises(Exception, match="closed"):
        first.execute("SELECT 1")


def test_after_an_error_what_was_begun_is_undone_and_another_one_is_made(engine):
    kept = KeptConnection()
    with kept.held(engine) as connection:
        connection.execute(text("CREATE TABLE note (number int)"))
        connection.commit()
        first = raw(connection)
    with pytest.raises(KeyError):
        fail(kept, engine)
    with kept.held(engine) as connection:
        assert raw(connection) is not first
        assert connection.execute(text("SELECT count(*) FROM note")).scalar() == 0
    kept.close()


def test_it_is_given_up_with_those_of_the_pool(engine):
    kept = KeptConnection()
    with kept.held(engine) as connection:
        first = raw(connection)
    engine.dispose()
    with kept.held(engine) as connection:
        assert raw(connection) is not first
    kept.close()


def fail(kept, engine):
    with kept.held(engine) as connection:
        connection.execute(text("INSERT INTO note VALUES (1)"))
        raise KeyError


def test_one_that_is_in_use_is_not_closed(engine):
    kept = KeptConnection()
    with kept.held(engine) as connection:
        kept.close()
        assert connection.execute(text("SELECT 1")).scalar() == 1
    kept.close()
    kept.close()
