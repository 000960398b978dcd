"""Programs that start at once: forked from a process that has already imported what takes seconds to import.

A program has its own arguments, environment, folder and streams, and it ends with its threads joined, its exit
handlers called and its own status. Only the teardown of modules is left out. What importing and launching do is
tested with processes that really start.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from functools import cache
from pathlib import Path

from tests.waiting import PATIENCE_SECONDS

__all__ = [
    "FORKED_FROM",
    "SERVER",
    "SERVICES",
    "TORCH",
    "TRAINING",
    "Program",
    "command",
    "fork",
    "run_command",
    "run_forked",
]

TORCH = ("numpy", "torch", "torch.distributed")
"""For a program that imports the agent itself. One zygote for each such list stands in every process of pytest that
asks."""
TRAINING = (
    *TORCH,
    "torch.distributed.fsdp",
    "torch.distributed.device_mesh",
    "collage_agent.session",
    "collage_optim",
    "collage_monitor.command",
)
"""What a training imports, in one process or in several."""
SERVER = (
    "collage_server.app",
    "collage_server.command.serve",
    "collage_monitor.command",
    "psycopg",
    "uvicorn.protocols.http.httptools_impl",
    "uvloop",
)
SERVICES = (*SERVER, "collage_dashboard.command", "waitress.server")
"""Where dashboards start, too."""

FORKED_FROM: set[int] = set()
"""Ids of the processes that programs are forked from: what those import is no cost of the test that comes first."""
_ROOT = Path(__file__).parents[1]
_LARGEST_ORDER_BYTES = 2**17


def fork(imports, *arguments, environment=None, folder=None, output=None):
    """Start `python *arguments` ("-c CODE", "-m MODULE" or a script, and "-W error" before it) as a `Program`.

    environment: all of it; this process's own by default. output: an open file for both streams instead of pipes,
    or one for each.
    """
    return _zygote(imports).start(
        {
            "arguments": [str(argument) for argument in arguments],
            "environment": dict(os.environ if environment is None else environment),
            "folder": str(folder or Path.cwd()),
        },
        output,
    )


def run_forked(imports, *arguments, **options) -> subprocess.CompletedProcess[str]:
    """A program from its start to its end, as `subprocess.run` tells of it."""
    program = fork(imports, *arguments, **options)
    output, errors = program.communicate()
    return subprocess.CompletedProcess(arguments, program.returncode, output, errors)


def command(*arguments):
    """The argument list that runs `collage-monitor` with this interpreter."""
    return [sys.executable, "-c", "from collage_monitor.command import main; main()", *map(str, arguments)]


def run_command(imports, *arguments, **options):
    """A command of `collage-monitor` from its start to its end."""
    return run_forked(imports, *command(*arguments)[1:], **options)


class Program:
    """A forked program with the verbs of `subprocess.Popen`; its standard error is told at its end."""

    def __init__(self, status, output, errors):
        self.stdout = output
        self.returncode = None
        self._status = status
        self._errors = errors
        self._told = ""
        self.pid = int(status.readline())

    def poll(self):
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout=2 * PATIENCE_SECONDS):
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked program", timeout)
            with self._status:
                self.returncode = int(self._status.readline())
            if self._errors is not None:
                with self._errors:
                    self._errors.seek(0)
                    self._told = self._errors.read()
        return self.returncode

    def communicate(self, timeout=2 * PATIENCE_SECONDS):
        """(what it wrote since, its standard error); it is killed if it takes longer than the timeout."""
        killer = threading.Timer(timeout, self.kill)
        killer.start()
        try:
            with self.stdout:
                output = self.stdout.read()
            self.wait()
        finally:
            killer.cancel()
        return output, self._told

    def send_signal(self, number):
        """Nothing if it has ended, be it so lately that its status has not come yet."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


class _Zygote:
    """This side of a process that forks on order; it ends with its socket.

    above: one that has imported the first of these names, from which it is forked.
    """

    def __init__(self, imports, above=None):
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            if above is not None:
                order = json.dumps({"imports": imports}).encode()
                socket.send_fds(above._orders, [order], [theirs.fileno()])
                FORKED_FROM.add(int(self._orders.recv(_LARGEST_ORDER_BYTES)))
                atexit.register(self._orders.close)
                return
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forking", str(theirs.fileno()), *imports],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=_ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
        FORKED_FROM.add(self._process.pid)
        atexit.register(self.close)

    def close(self):
        self._orders.close()
        self._process.wait()

    def start(self, order, output):
        read_status, write_status = os.pipe()
        if output is None:
            read_output, write_output = os.pipe()
            errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - read when the program has ended
            streams = [write_output, errors.fileno()]
        else:
            files = output if isinstance(output, tuple) else (output, output)
            streams = [file.fileno() for file in files]
        socket.send_fds(self._orders, [json.dumps(order).encode()], [*streams, write_status])
        os.close(write_status)
        status = os.fdopen(read_status)
        if output is not None:
            return Program(status, None, None)
        os.close(write_output)
        return Program(status, os.fdopen(read_output), errors)


@cache
def _zygote(imports):
    for fewer in (TORCH, SERVER):
        if imports != fewer and imports[: len(fewer)] == fewer:
            return _Zygote(imports, _zygote(fewer))
    return _Zygote(imports)


def _run(arguments):
    """As the interpreter runs its command line."""
    while arguments[0] == "-W":
        warnings.simplefilter(arguments[1])
        arguments = arguments[2:]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path[0] = ""
        code = compile(arguments[1], "<string>", "exec")
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(arguments[0]).parent)
        main.__file__ = arguments[0]
        code = compile(Path(arguments[0]).read_text(encoding="utf-8"), arguments[0], "exec")
    exec(code, main.__dict__)


def _keep(status):
    """Fork the program; in the parent tell its process id and, when it has ended, how."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        return
    os.closerange(0, status)
    os.closerange(status + 1, 64)
    os.write(status, f"{pid}\n".encode())
    _, ended = os.waitpid(pid, 0)
    os.write(status, f"{os.waitstatus_to_exitcode(ended)}\n".encode())
    os._exit(0)


def _reap(*_):
    # Waiting for what has ended, and not ignoring it, counts its processor time as the zygote's.
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _import(names):
    for name in names:
        importlib.import_module(name)
    gc.freeze()


def main(orders, imports):
    """Fork for each order until the other side closes the socket."""
    _import(imports)
    signal.signal(signal.SIGCHLD, _reap)
    while True:
        content, descriptors, _, _ = socket.recv_fds(orders, _LARGEST_ORDER_BYTES, 3)
        if not content:
            return
        if os.fork() == 0:
            orders.close()
            order = json.loads(content)
            if "imports" not in order:
                break
            orders = socket.socket(fileno=descriptors.pop())
            _import(order["imports"])
            orders.send(str(os.getpid()).encode())
        for descriptor in descriptors:
            os.close(descriptor)
    output, errors, status = descriptors
    _keep(status)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    for descriptor in descriptors:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    _end(_status_of(order["arguments"]))


def _status_of(arguments):
    try:
        _run(arguments)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        sys.stderr.write(f"{error.code}\n")
        return 1
    except BaseException:
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _end(status):
    """As the interpreter ends, but for the teardown: that would copy all memory that is shared with the zygote."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
