"""The application of the server's tests, for the pages that alerts read."""

from tests.server.conftest import clock, server, settings

__all__ = ["clock", "server", "settings"]
