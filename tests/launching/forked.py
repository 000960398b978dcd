"""Training programs that know nothing of the agent, as processes of their own; an interpreter that starts forks.

The interpreter is to hand to `cure --check` and `check`: it starts a script watched, or a module. The script gets
its arguments, environment, folder, streams and exit status as from a real start. That a program that really starts
is watched, `test_launcher` tests.
"""

import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

from collage_monitor.environment import ATTACH, launch_variables
from tests import forking
from tests.waiting import PATIENCE_SECONDS

__all__ = ["TRAINING", "bootstrap", "forked_python", "launched", "python", "write"]

TRAINING = """
import hashlib, random, sys
import torch

torch.manual_seed(0)
random.seed(0)
model = torch.nn.Sequential(torch.nn.Linear(30, 80), torch.nn.Dropout(0.1), torch.nn.Linear(80, 3)).bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for step in range(20):
    optimizer.zero_grad()
    loss = (model(torch.randn(16, 30).bfloat16()).float() - 1).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
tensors = [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes() + repr((losses, random.getstate())).encode())
for tensor in tensors:
    digest.update(tensor.detach().double().numpy().tobytes())
print("digest", digest.hexdigest())
"""


def write(folder, text, name="train.py"):
    path = folder / name
    path.write_text(text)
    return path


def launched(folder, *program, options=(), watched=True, forked=True, **variables):
    """The finished process of a program, under `collage-monitor run` or without it.

    forked: the command starts forked, from a process that has imported it; the program really starts in its place.
    """
    start = [*forking.command("run", *options, "--")] if watched else []
    environment = {key: value for key, value in os.environ.items() if not key.startswith("COLLAGE_")}
    environment |= {"COLLAGE_MODE": "offline", "COLLAGE_DIR": str(folder / "data"), "OMP_NUM_THREADS": "1"}
    environment |= variables
    if watched and forked:
        return forking.run_forked(forking.TRAINING, *start[1:], *program, environment=environment, folder=folder)
    return subprocess.run(
        [*start, *map(str, program)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_SECONDS,
        check=False,
        cwd=folder,
    )


def python(*arguments):
    return [sys.executable, *map(str, arguments)]


def bootstrap():
    """The folder in front of PYTHONPATH."""
    return Path(launch_variables({})["PYTHONPATH"])


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
            program = forking.fork(forking.TRAINING, *module, **options, output=(said, complained))
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
