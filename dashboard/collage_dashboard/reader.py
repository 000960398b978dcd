"""The one way to the server: a client made on first use, and every failure as a problem in plain words."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from collage_monitor.client import Client
from collage_monitor.errors import CollageError, NotAuthorised, NotFound, ServerUnreachable, Unavailable

__all__ = ["Problem", "Reader", "explain"]

_Answer = TypeVar("_Answer")
_START: Final = "collage-monitor up"


@dataclass(frozen=True)
class Problem:
    """Why a page cannot show what was asked: what happened, what to do, and the command that does it."""

    title: str
    text: str
    command: str = ""
    temporary: bool = False


class Reader:
    """Asks the server. Thread-safe; after a refused token the client is made anew: a changed file counts."""

    def __init__(self, client_factory: Callable[[], Client]) -> None:
        self._factory = client_factory
        self._lock = threading.Lock()
        self._client: Client | None = None

    def ask(self, question: Callable[[Client], _Answer]) -> _Answer:
        """The answer to `question`.

        Raises:
            CollageError: the server does not answer, or refuses.
        """
        client = self._current()
        try:
            return question(client)
        except NotAuthorised:
            with self._lock:
                if self._client is client:
                    self._client = None
            raise

    def ask_together(self, *questions: Callable[[Client], Any]) -> list[Any]:
        """The answers to several questions, asked at the same time.

        Raises:
            CollageError: the first that went wrong.
        """
        with ThreadPoolExecutor(len(questions)) as threads:
            return [answer.result() for answer in [threads.submit(self.ask, question) for question in questions]]

    def _current(self) -> Client:
        with self._lock:
            if self._client is None:
                self._client = self._factory()
            return self._client


def explain(error: CollageError) -> Problem:
    """What a reader should know and do about an error."""
    if isinstance(error, ServerUnreachable):
        return Problem("The server does not answer", str(error), _START, temporary=True)
    if isinstance(error, NotAuthorised):
        text = f"{error}. Start the dashboard with the server's token: --token-file, --token or COLLAGE_TOKEN."
        return Problem("The server refused the token", text, "collage-monitor dashboard --token-file FILE")
    if isinstance(error, NotFound):
        return Problem("Nothing is stored under this address", f"{error}. It may have been deleted.")
    if isinstance(error, Unavailable):
        return Problem("The server is busy", f"{error}. The page asks again by itself.", temporary=True)
    return Problem("The server refused this question", str(error))
