"""The script that makes the secrets, run for real; what only root or a database can do is written down instead."""

import os
import subprocess
from pathlib import Path
from typing import Any

from tests.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "server/deploy/secrets.sh"
CHOWN = '#!/bin/sh\necho "$@" >> "$WRITTEN/chown"\n'
COMMAND = """#!/bin/sh
echo "$@" >> "$WRITTEN/command"
while [ $# -gt 1 ]; do [ "$1" = --output ] && [ ! -e "$2" ] && echo a-token > "$2"; shift; done
exit "${FAILS:-0}"
"""


class Secrets:
    """The folder of secrets, and what the script asked for."""

    def __init__(self, folder):
        self.folder = folder / "secrets"
        self.configuration = folder / "configuration"
        self.written = folder / "written"
        programs = folder / "programs"
        for made in (self.folder, self.written, programs):
            made.mkdir()
        for name, text in (("chown", CHOWN), ("collage-monitor", COMMAND)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        self._environment = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "SECRETS": str(self.folder),
            "CHECKOUT": str(ROOT / "server"),
            "CONFIGURATION": str(self.configuration),
            "WRITTEN": str(self.written),
            "COLLAGE_NAME": "monitor.example",
        }

    def run(self, stage, **environment):
        options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": PATIENCE_SECONDS}
        return subprocess.run(["sh", SCRIPT, stage], env=self._environment | environment, check=False, **options)

    def files(self):
        return {
            str(file.relative_to(self.folder)): file.read_text()
            for file in sorted(self.folder.rglob("*"))
            if file.is_file()
        }

    def lines(self, name):
        return (self.written / name).read_text().splitlines()
