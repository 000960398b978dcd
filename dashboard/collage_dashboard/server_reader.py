"""The one way to the server: a client made on first use, and every failure as a problem in plain words.

`create_dashboard` makes one; pages read through it and show a `Problem` where it gives one. It keeps no data but
what a page will ask for as soon as it is there: a few, none of them used after some seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

from cachetools import LRUCache, TTLCache
from flask import Response, copy_current_request_context, has_request_context

from collage_monitor.client import Client
from collage_monitor.errors import (
    CollageError,
    NotAuthorised,
    NotFound,
    ServerRefusal,
    ServerUnreachable,
    Unavailable,
)

__all__ = ["Problem", "Reader", "ask_each", "explain", "refusal_answer"]

_Answer = TypeVar("_Answer")
_MOST_CLIENTS: Final = 64
_MOST_AHEAD, _AHEAD_AT_ONCE, _AHEAD_SECONDS = 64, 4, 20.0
_START: Final = "collage-monitor up"


@dataclass(frozen=True)
class Problem:
    """Why a page cannot show the requested data: the problem, the remedy, and the command for it."""

    title: str
    text: str
    command: str = ""
    temporary: bool = False


class Reader:
    """Asks the server. Thread-safe; after a refused token the client is made again: a changed file counts.

    whose: distinguishes the users of one process, each of whom gets a separate client; called in the caller's
    thread.
    on_unknown: called there when the server does not know the asker's token.
    """

    def __init__(
        self,
        client_factory: Callable[[], Client],
        whose: Callable[[], str] = str,
        on_unknown: Callable[[], None] = lambda: None,
    ) -> None:
        self._factory = client_factory
        self._whose = whose
        self._on_unknown = on_unknown
        self._lock = threading.Lock()
        self._clients: LRUCache[str, Client] = LRUCache(_MOST_CLIENTS)
        self._ahead = ThreadPoolExecutor(_AHEAD_AT_ONCE, "ahead")
        self._begun: TTLCache[tuple[str, Hashable], Future[Any]] = TTLCache(_MOST_AHEAD, _AHEAD_SECONDS)

    def ask(self, question: Callable[[Client], _Answer]) -> _Answer:
        """The answer to `question`.

        Raises:
            CollageError: the server does not answer, or refuses.
        """
        [answer] = self.ask_together(question)
        return cast(_Answer, answer)

    def ask_together(self, *questions: Callable[[Client], Any]) -> list[Any]:
        """The answers to several questions, asked at the same time.

        Raises:
            CollageError: the first that went wrong.
        """
        whose = self._whose()
        client = self._client_of(whose)
        try:
            if len(questions) == 1:
                return [questions[0](client)]
            with ThreadPoolExecutor(len(questions)) as threads:
                return [answer.result() for answer in [threads.submit(asked, client) for asked in questions]]
        except NotAuthorised as error:
            with self._lock:
                if self._clients.get(whose) is client:
                    del self._clients[whose]
            if error.status == 401:
                self._on_unknown()
            raise

    def begin(self, key: Hashable, make: Callable[[], _Answer]) -> None:
        """Make in the background what the same user's page will ask for in a moment."""
        if not has_request_context():
            return
        mine = (self._whose(), key)
        with self._lock:
            if mine not in self._begun:
                self._begun[mine] = self._ahead.submit(copy_current_request_context(make))

    def begun_or_now(self, key: Hashable, make: Callable[[], _Answer]) -> _Answer:
        """What was begun under the key, once; made now if nothing was, or if it went wrong.

        Raises:
            CollageError: as `make` raises.
        """
        with self._lock:
            begun = self._begun.pop((self._whose(), key), None)
        if begun is not None:
            with suppress(CollageError):
                return cast(_Answer, begun.result())
        return make()

    def _client_of(self, whose: str) -> Client:
        with self._lock:
            client = self._clients.get(whose)
            if client is None:
                client = self._clients[whose] = self._factory()
            return client


def ask_each(metrics: Sequence[str], ask: Callable[[Sequence[str]], _Answer]) -> dict[str, _Answer | str]:
    """By metric the answer that holds it: one for all of them. One that is refused, and why, does not spoil others.

    Raises:
        CollageError: the server does not answer, or refuses the token.
    """
    try:
        return dict.fromkeys(metrics, ask(metrics))
    except NotAuthorised:
        raise
    except ServerRefusal as error:
        if len(metrics) == 1:
            return {metrics[0]: str(error)}
        return {metric: found for one in metrics for metric, found in ask_each([one], ask).items()}


def refusal_answer(error: CollageError, status: int = 502) -> Response:
    """Why a file cannot be sent."""
    problem = explain(error)
    status = 404 if isinstance(error, NotFound) else status
    return Response(f"{problem.title}: {problem.text}\n", status, mimetype="text/plain")


def explain(error: CollageError) -> Problem:
    """The explanation of an error for a reader, and the remedy."""
    if isinstance(error, ServerUnreachable):
        return Problem("The server does not answer", str(error), _START, temporary=True)
    if isinstance(error, NotAuthorised):
        text = f"{error}. Start the dashboard with the server's token: --token-file, --token or COLLAGE_TOKEN."
        return Problem("The server refused the token", text, "collage-monitor serve dashboard --token-file FILE")
    if isinstance(error, NotFound):
        return Problem("Nothing is stored under this address", f"{error}. It may have been deleted.")
    if isinstance(error, Unavailable):
        return Problem("The server is busy", f"{error}. The page asks again by itself.", temporary=True)
    return Problem("The server refused this question", str(error))
