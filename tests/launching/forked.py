"""An interpreter to hand to `cure --check` and `check`: it starts a script watched, or a module, by a fork.

The script gets its arguments, environment, folder, streams and exit status as from a real start. That a program
that really starts is watched, `test_launcher` tests.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

from collage_monitor.environment import ATTACH
from tests.forking import TRAINING, fork
from tests.launching.programs import bootstrap

__all__ = ["forked_python"]

_CLIENT = """#!{python} -IS
import json, os, socket, sys
if sys.argv[1] == "-c":
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
order = json.dumps({{"arguments": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}})
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [order.encode() + b"\\n"], [1, 2])
    sys.exit(int(server.makefile().readline()))
"""


@contextmanager
def forked_python():
    """The path of the interpreter."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listening:
        address = str(Path(folder, "orders"))
        listening.bind(address)
        listening.listen()
        thread = threading.Thread(target=_serve, args=[listening])
        thread.start()
        program = Path(folder, "python")
        program.write_text(_CLIENT.format(python=sys.executable, address=address))
        program.chmod(0o700)
        try:
            yield str(program)
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


def _serve(listening):
    programs = []
    while True:
        try:
            client, _ = listening.accept()
        except OSError:
            break
        programs.append(threading.Thread(target=_run, args=[client]))
        programs[-1].start()
    for thread in programs:
        thread.join()


def _run(client):
    with client:
        content, (output, errors), _, _ = socket.recv_fds(client, 2**17, 2)
        order = json.loads(content)
        given = order["arguments"]
        module = given if given[0] == "-m" else ("-m", "tests.launching.forked", *given)
        with os.fdopen(output, "wb") as said, os.fdopen(errors, "wb") as complained:
            options = {"environment": order["environment"], "folder": order["folder"]}
            program = fork(TRAINING, *module, **options, output=(said, complained))
        client.sendall(f"{program.wait()}\n".encode())


def main(script, *arguments):
    """What an interpreter does that finds PYTHONPATH, our `sitecustomize` in it and then torch; then the script."""
    from collage_agent.integrations.bootstrap import sitecustomize

    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(bootstrap()) in folders and os.environ.get(ATTACH) == "1":
        sitecustomize.hook_optimizers()
    sys.path[:0] = filter(None, folders)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
