"""Importing the server opens, starts and configures nothing; the contract alone never pulls it in."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.slow

CHECK = """
import logging, sys, threading
before = threading.active_count(), len(logging.root.handlers)
import collage_server.app, collage_server.command.serve, collage_server.exposition
assert (threading.active_count(), len(logging.root.handlers)) == before
assert "torch" not in sys.modules and "dash" not in sys.modules
assert not {"authlib", "cryptography", "httpx2", "joserfc"} & set(sys.modules)  # A server without a provider.
import prometheus_client
names = [family.name for family in prometheus_client.REGISTRY.collect()]
assert not [name for name in names if name.startswith("collage")], names
import gc, socket, sqlite3
assert not [o for o in gc.get_objects() if isinstance(o, (socket.socket, sqlite3.Connection))]
"""


def test_importing_starts_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", CHECK],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
