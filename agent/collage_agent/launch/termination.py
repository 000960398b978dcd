"""How the process ends: by SIGTERM, after which queued reports are sent or kept, or by `sys.exit` with a status.

If the training handles the signal itself, its handler stays: it ends in `finish` or with the interpreter. Otherwise
the process still dies of the signal, with the same status, a moment later.
"""

from __future__ import annotations

import builtins
import ctypes
import functools
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, NoReturn

from collage_monitor.environment import EXIT_HOOKS

__all__ = ["ExitStatus", "TerminationHandler", "is_failure", "takes_exit_hooks"]

_LOG = logging.getLogger("collage_agent")
_FLUSH_SECONDS: Final = 3.0


class TerminationHandler:
    """On SIGTERM, calls `flush(seconds)` and then lets the signal take effect, both on a separate thread.

    Python runs signal handlers on the main thread between two of its instructions. There the main thread may hold a
    lock that flushing needs, and a rank that waits for others inside a collective never gets there. So the handler
    only wakes the thread, which listens on the signal's wake-up descriptor, too, as far as that is free. Until the
    thread has flushed the training goes on, as it would if the signal came a moment later.
    """

    def __init__(self, flush: Callable[[float], object]) -> None:
        self._flush = flush
        self._writer: int | None = None
        self._thread: threading.Thread | None = None
        self._has_come = False

    def install(self) -> None:
        """Take the signal, if it has its default meaning and this is the main thread. Safe to call again."""
        if self._writer is not None or sys.platform == "win32":
            return
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        thread = threading.Thread(target=self._listen, args=(reader,), daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # No thread can be started: the signal keeps its default meaning.
            os.close(reader)
            os.close(writer)
            return
        self._thread, self._writer = thread, writer
        signal.signal(signal.SIGTERM, self._on_signal)
        taken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        if taken != -1:
            signal.set_wakeup_fd(taken)

    def uninstall(self) -> None:
        """Restore the signal's handler, unless something else has replaced it meanwhile."""
        if self._writer is None or threading.current_thread() is not threading.main_thread():
            return
        if self._is_ours():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        current = signal.set_wakeup_fd(-1)
        if current not in {-1, self._writer}:
            signal.set_wakeup_fd(current)
        writer, self._writer = self._writer, None
        os.close(writer)

    def wait_if_terminating(self) -> None:
        """At the interpreter's end: let the thread flush and end the process, if the signal has come."""
        if self._has_come and self._thread is not None:
            self._thread.join(_FLUSH_SECONDS)

    def _is_ours(self) -> bool:
        return signal.getsignal(signal.SIGTERM) == self._on_signal

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Takes no lock: the main thread may hold any.
        if self._writer is None:
            return
        try:
            os.write(self._writer, bytes([number]))
        except BlockingIOError:
            pass  # what fills the pipe wakes the thread, too
        except OSError:
            # Somebody has closed the pipe, as a program does that becomes a daemon.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def _listen(self, reader: int) -> None:
        while numbers := os.read(reader, 512):
            # A later handler may call ours even if the signal had its default meaning, which cannot be called.
            if signal.SIGTERM in numbers and self._is_ours():
                self._has_come = True
                self._flush_quietly()
                _restore_default_meaning()
                os.kill(os.getpid(), signal.SIGTERM)
        os.close(reader)

    def _flush_quietly(self) -> None:
        try:
            self._flush(_FLUSH_SECONDS)
        except Exception:
            _LOG.exception("sending what is left failed")


class ExitStatus:
    """Whether `sys.exit`, `exit` or `quit` has asked the process to end as a failure.

    The interpreter forgets the status before its exit handlers run, so the call itself is observed. A call on
    another thread ends only that thread. A bare `raise SystemExit(3)` passes unseen.
    """

    def __init__(self) -> None:
        self.failed = False
        self._noting = False

    def begin_noting(self) -> None:
        """Observe these calls from now on, without changing them; only the first call of this does anything."""
        if self._noting:
            return
        self._noting = True
        plain_exit = sys.exit

        @functools.wraps(plain_exit)
        def noting_exit(status: Any = None, /) -> NoReturn:
            self._note(status)
            plain_exit(status)

        sys.exit = noting_exit
        # `exit` and `quit` are there unless Python runs without `site`.
        quitter = type(getattr(builtins, "exit", None))
        if quitter.__name__ == "Quitter":
            plain_call: Any = quitter.__call__

            def noting_call(this: object, code: Any = None) -> NoReturn:
                self._note(code)
                plain_call(this, code)
                raise AssertionError("exit returned")

            quitter.__call__ = noting_call  # type: ignore[method-assign]

    def _note(self, status: object) -> None:
        if threading.current_thread() is threading.main_thread():
            self.failed = is_failure(status)


def takes_exit_hooks() -> bool:
    """Whether the process lets the agent have SIGTERM and look at `sys.exit`: unless COLLAGE_EXIT_HOOKS is off."""
    return os.environ.get(EXIT_HOOKS, "").strip().lower() not in {"off", "0", "false", "no"}


def is_failure(status: object) -> bool:
    """Whether a status of `sys.exit` means failure: any number but 0, or a message."""
    return status is not None and status != 0


def _restore_default_meaning() -> None:
    """As `signal.signal`, but from a thread other than the main one."""
    restore = ctypes.CDLL(None).signal
    restore.argtypes = [ctypes.c_int, ctypes.c_void_p]
    restore.restype = ctypes.c_void_p
    restore(int(signal.SIGTERM), None)
