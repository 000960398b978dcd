"""`collage-monitor setup team`: a server for a team on a machine with systemd and nginx; tried at the end.

`docs/team-server.md` shows it (`tests/deploy/test_setup_team.py`).
"""

from __future__ import annotations

import json
import os
import pwd
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click

from collage_monitor.command import VerbGroup
from collage_monitor.errors import CollageError
from collage_monitor.local import token_path, write_private
from collage_server.settings import settings_from_environment

__all__ = ["setup"]

_WRITTEN: Final = "# Written by `collage-monitor setup team`, which replaces it.\n"
_PREFIX: Final = "COLLAGE_SERVER_"
_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
_SERVICE: Final = """
[Service]
User={user}
EnvironmentFile={env}
ExecStart={start}
Restart=on-failure
RestartSec=2
LimitNOFILE=8192
NoNewPrivileges=yes
PrivateTmp=yes
ProtectSystem=full

[Install]
WantedBy=multi-user.target
"""
_SERVER: Final = """[Unit]
Description=Collage Monitor: server
After=network-online.target postgresql.service
Wants=network-online.target
"""
_DASHBOARD: Final = """[Unit]
Description=Collage Monitor: dashboard
After=collage-server.service
Wants=collage-server.service
"""
_BACKUP: Final = """[Unit]
Description=Collage Monitor: back-up, read again

[Service]
Type=oneshot
User={user}
EnvironmentFile={env}
ExecStart=/bin/sh -ec '{lines}'
"""
_TIMER: Final = """[Unit]
Description=Collage Monitor: a back-up each day, of which seven are kept

[Timer]
OnCalendar=daily
RandomizedDelaySec=30m
Persistent=yes

[Install]
WantedBy=timers.target
"""
_ZONE: Final = "limit_conn_zone $binary_remote_addr zone=collage_address:4m;\n"
_SITE: Final = """
server {{
    listen {port} ssl;
    server_name {name};
    access_log off;
    server_tokens off;
    ssl_certificate {certificate};
    ssl_certificate_key {key};
    ssl_protocols TLSv1.2 TLSv1.3;
    # The bounds of server/deploy/nginx.conf, which says why.
    large_client_header_buffers 4 16k;
    client_header_timeout 10s;
    keepalive_timeout 10s;
    reset_timedout_connection on;
    client_max_body_size 16m;
    client_body_timeout 20s;
    proxy_request_buffering off;
    limit_conn collage_address 200;
    limit_conn_status 429;
    proxy_http_version 1.1;
    proxy_set_header Connection "";
    proxy_set_header Host $http_host;
    proxy_set_header Authorization {authorization};
    proxy_set_header X-Forwarded-For $remote_addr;
    proxy_set_header X-Forwarded-Proto https;
    proxy_connect_timeout 5s;
    proxy_read_timeout 60s;
    proxy_max_temp_file_size 0;
    location / {{
        proxy_pass http://127.0.0.1:{service};
    }}
}}
"""


@click.group("setup", cls=VerbGroup)
def setup() -> None:
    """Set up a server for a team, or the schema of its database."""


@setup.command("team")
@click.option("--name", required=True, help="Name under which agents and browsers reach this machine.")
@click.option(
    "--set", "given", multiple=True, metavar="NAME=VALUE", help="A setting, such as ALERT_SLACK=https://…"
)
@click.option("--user", default="collage", show_default=True, help="User of the services; used when run by root.")
@click.option("--certificate", help="Default: /etc/letsencrypt/live/NAME/fullchain.pem.")
@click.option("--key", help="Default: /etc/letsencrypt/live/NAME/privkey.pem.")
@click.option("--root", type=click.Path(path_type=Path), default="/", help="Write all files below this folder.")
def team(name: str, given: Sequence[str], user: str, certificate: str | None, key: str | None, root: Path) -> None:
    """Set up a server for a team: settings, systemd services, a daily back-up, an nginx site, tokens.

    The end tries them: one message to each target of alerts, and a back-up that is read again. Settings and tokens
    that are there stay; other files are replaced, unless somebody else wrote them.
    """
    if not _NAME.fullmatch(name):
        raise click.UsageError(f"--name {name!r} is no host name; give one such as monitor.example")
    place = Installation(root.absolute(), user, name)
    live = f"/etc/letsencrypt/live/{name}"
    place.write_settings(given)
    place.write_units()
    place.write_site(certificate or f"{live}/fullchain.pem", key or f"{live}/privkey.pem")
    place.make_tokens()
    told = place.send_test()
    place.back_up()
    click.echo(f"tokens: {place.etc}/ingest-token for trainings, {place.etc}/read-token for the dashboard")
    click.echo(f"back-up: {place.backups}, read again\n\nthen, as root:")
    if certificate is None:
        click.echo(f"certbot certonly --nginx --domain {name} --deploy-hook 'systemctl reload nginx'")
    click.echo("systemctl daemon-reload")
    click.echo("systemctl enable --now collage-server collage-dashboard collage-backup.timer")
    click.echo("nginx -t && systemctl reload nginx")
    raise SystemExit(0 if told else 1)


class Installation:
    """The files of an installation below a folder, and its commands, run as its user."""

    def __init__(self, root: Path, user: str, name: str) -> None:
        self.root, self.user, self.name = root, user, name
        self.etc, self.data, self.backups = (
            root / folder for folder in ("etc/collage", "var/lib/collage", "var/backups/collage")
        )
        self.env = self.etc / "server.env"
        self.command = str(Path(sys.executable).with_name("collage-monitor"))
        self._as_user: dict[str, Any] = {}
        if os.getuid() == 0:
            try:
                known = pwd.getpwnam(user)
            except KeyError as error:
                make = f"adduser --system --group --home /var/lib/collage {user}"
                raise click.UsageError(f"--user {user!r} is no user of this machine; make it: {make}") from error
            self._as_user = {"user": known.pw_uid, "group": known.pw_gid, "extra_groups": []}

    def write_settings(self, given: Sequence[str]) -> None:
        """Write the file of settings, unless it is there, and make folders that its user alone reads."""
        settings = {
            "TRUSTED_PROXIES": "127.0.0.1",
            "ARCHIVE": str(self.data / "archive"),
            "DASHBOARD_URL": f"https://{self.name}:7421",
            "ALERTS": "warning",
        }
        for entry in given:
            name, found, value = entry.partition("=")
            if not found or not value or set(value) & set("'\n"):
                raise click.UsageError(f"--set {entry!r} is no NAME=VALUE without ' and line breaks")
            settings[name.removeprefix(_PREFIX)] = value
        for folder in (self.etc, self.data, self.backups):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
            self._hand_over(folder)
        if not self.env.exists():
            chosen = {_PREFIX + name: value for name, value in settings.items()}
            try:
                settings_from_environment(chosen, folder=self.data, no_auth=True)
            except CollageError as error:
                raise click.UsageError(str(error)) from error
            write_private(self.env, "".join(f"{name}={shlex.quote(value)}\n" for name, value in chosen.items()))
            self._hand_over(self.env)
        elif given:
            raise click.UsageError(f"{self.env} is there and stays; change it there, and leave out --set")

    def _hand_over(self, path: Path) -> None:
        if self._as_user:
            os.chown(path, self._as_user["user"], self._as_user["group"])

    def settings(self) -> dict[str, str]:
        """The settings as the services get them."""
        lines = (line for line in self.env.read_text().splitlines() if line and not line.startswith("#"))
        pairs = (line.partition("=") for line in lines)
        return {name: "".join(shlex.split(value)) for name, _, value in pairs}

    def write_units(self) -> None:
        """Write the services, and the timer of the back-up."""
        common = f"--dir {self.data}"
        starts = {
            "collage-server": (_SERVER, f"serve --port 7410 {common} --allowed-host {self.name}"),
            "collage-dashboard": (
                _DASHBOARD,
                "serve dashboard --port 7411 --server-url http://127.0.0.1:7410 "
                f"--token-file {self.etc}/read-token --allowed-host {self.name} --trusted-proxy 127.0.0.1",
            ),
        }
        place = {"user": self.user, "env": self.env}
        for service, (head, start) in starts.items():
            text = head + _SERVICE.format(start=f"{self.command} {start}", **place)
            self._write(f"etc/systemd/system/{service}.service", text)
        # A unit takes % and $ for its own.
        lines = self._backup_lines().replace("%", "%%").replace("$", "$$")
        self._write("etc/systemd/system/collage-backup.service", _BACKUP.format(lines=lines, **place))
        self._write("etc/systemd/system/collage-backup.timer", _TIMER)

    def _backup_lines(self) -> str:
        """A back-up under the day of the week, for `sh`; archived files of PostgreSQL's are copied beside it."""
        begin = f"umask 077; day=$(date +%u); cd {self.backups}"
        if _PREFIX + "DATABASE" not in self.settings():
            make, verify = (
                f'{self.command} backup {verb} --dir {self.data} "$day.sqlite"' for verb in ("make", "verify")
            )
            return f'{begin}; rm -f "$day.sqlite"; {make}; {verify}'
        return (
            f'{begin}; pg_dump --format=custom --file="$day.dump" "$COLLAGE_SERVER_DATABASE"; '
            f'pg_restore --list "$day.dump" > /dev/null; mkdir -p {self.data}/archive; '
            f'tar -C {self.data} --exclude=_collage.json -cf "$day.tar" archive'
        )

    def write_site(self, certificate: str, key: str) -> None:
        """Write nginx's site, a file of its own: server and dashboard, each at its port."""
        common = {"name": self.name, "certificate": certificate, "key": key}
        ports = ((7420, 7410, "$http_authorization"), (7421, 7411, '""'))
        servers = (_SITE.format(port=port, service=own, authorization=auth, **common) for port, own, auth in ports)
        self._write("etc/nginx/conf.d/collage-monitor.conf", _ZONE + "".join(servers))

    def _write(self, place: str, text: str) -> None:
        path = self.root / place
        if path.exists() and not path.read_text(errors="replace").startswith(_WRITTEN):
            raise click.ClickException(f"{path} is somebody else's; move it away, then run this again")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_WRITTEN + text)
        click.echo(f"wrote {path}")

    def make_tokens(self) -> None:
        """Make the tokens of trainings and of the dashboard, unless they are there and count."""
        if _PREFIX + "DATABASE" in self.settings():
            self._run([self.command, "setup", "database"])
        for role in ("ingest", "read"):
            place = ["--offline", "--dir", str(self.data), "--output", str(self.etc / f"{role}-token")]
            self._run([self.command, "token", "create", "--name", role, "--role", role, "--all-projects", *place])

    def send_test(self) -> bool:
        """Whether each target of alerts takes a message from a server that runs only for this."""
        with self._serving() as server_url:
            token = token_path(self.data).read_text(encoding="ascii").strip()
            done = self._run(
                [self.command, "alerts", "--test", "--server-url", server_url],
                {"COLLAGE_TOKEN": token},
                check=False,
            )
        return done.returncode == 0

    @contextmanager
    def _serving(self) -> Iterator[str]:
        serve = [self.command, "serve", "--port", "0", "--dir", str(self.data), "--json"]
        with subprocess.Popen(serve, env=self._environment(), stdout=subprocess.PIPE, **self._as_user) as process:
            try:
                line = process.stdout.readline() if process.stdout else b""
                if not line:
                    raise click.ClickException(
                        "the server ends at once: see above; put it right, then run this again"
                    )
                yield str(json.loads(line)["server_url"])
            finally:
                process.terminate()

    def back_up(self) -> None:
        """Make a back-up as the timer will, and read it again."""
        self._run(["/bin/sh", "-ec", self._backup_lines()])

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("COLLAGE_")}
        return {**kept, **self.settings()}

    def _run(
        self, command: Sequence[str], more: Mapping[str, str] | None = None, *, check: bool = True
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a command as the services' user, with their settings."""
        done = subprocess.run(command, env=self._environment() | dict(more or {}), check=False, **self._as_user)
        if check and done.returncode:
            raise click.ClickException(f"{shlex.join(command)} ended with {done.returncode}: see above")
        return done
