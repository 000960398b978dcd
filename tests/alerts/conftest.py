"""The application of the server's tests, for the pages that alerts read; a dashboard and a browser to see them."""

from tests.browser.conftest import browser, contexts, dashboard, open_page
from tests.server.conftest import clock, server, settings

__all__ = ["browser", "clock", "contexts", "dashboard", "open_page", "server", "settings"]
