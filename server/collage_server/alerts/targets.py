"""Where messages about incidents go: a webhook, Slack, e-mail. Addresses come from the settings alone.

A webhook's host is resolved and checked first, and the very address that was checked is connected to. Redirects are
not followed. So neither a sender of runs nor the owner of a name can make this server call its neighbours.
"""

from __future__ import annotations

import ipaddress
import logging
import smtplib
import socket
import ssl
from abc import ABC, abstractmethod
from collections.abc import Iterable
from email.message import EmailMessage
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

import httpx

from collage_monitor import wire
from collage_monitor.alerts import ALERTS
from collage_server.errors import UnsafeAddress
from collage_server.settings import Settings

__all__ = ["EmailTarget", "SlackTarget", "Target", "WebhookTarget", "targets_of", "try_targets"]

_LOG: Final = logging.getLogger(__name__)
_TIMEOUT_SECONDS: Final = 10.0
_NAT64: Final = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("64:ff9b:1::/48"))
"""RFC 6052, RFC 8215: the last 32 bits are an IPv4 address."""
_METADATA: Final = frozenset(map(ipaddress.ip_address, ("fd00:ec2::254", "100.100.100.200", "168.63.129.16")))
"""Addresses without a kind of their own that tell a machine's secrets: AWS over IPv6, Alibaba's, Azure's."""


class Target(ABC):
    """One destination of messages; `name` identifies it in the recorded deliveries."""

    name: str

    @abstractmethod
    def send(self, incident: wire.Incident) -> None:
        """Deliver a message about the incident as it stands. Blocks for seconds at most; raises if it failed."""


class WebhookTarget(Target):
    """JSON by POST: {"version": 1, "incident": {…}, "meaning", "first_step", "runbook", "page"}."""

    name = "webhook"

    def __init__(self, url: str, dashboard_url: str | None = None) -> None:
        self._url = url
        self._dashboard_url = dashboard_url

    def send(self, incident: wire.Incident) -> None:
        """Post the message; anything but an answer 2xx is a failure."""
        _post(self._url, self.body(incident))

    def body(self, incident: wire.Incident) -> dict[str, Any]:
        """What is sent."""
        entry = ALERTS.get(incident.alert)
        return {
            "version": 1,
            "incident": incident,
            "meaning": entry.meaning if entry else None,
            "first_step": entry.first_step if entry else None,
            "runbook": f"docs/alerts.md#{incident.alert.lower()}" if entry else None,
            "page": _page_of(incident, self._dashboard_url),
        }


class SlackTarget(WebhookTarget):
    """A Slack incoming webhook, or anything that takes {"text": …} as Slack does."""

    name = "slack"

    def body(self, incident: wire.Incident) -> dict[str, Any]:
        """What is sent."""
        # Slack reads <…> and & as its own marks.
        text = (
            _as_text(incident, self._dashboard_url).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        )
        return {"text": text}


class EmailTarget(Target):
    """E-mail through an SMTP server (smtp://USER:PASSWORD@HOST:PORT; smtps:// for TLS from the first byte)."""

    name = "email"

    def __init__(self, server: str, sender: str, recipients: list[str], dashboard_url: str | None = None) -> None:
        self._dashboard_url = dashboard_url
        self._server = urlsplit(server)
        self._sender = sender
        self._recipients = recipients

    def send(self, incident: wire.Incident) -> None:
        """Send one message to all recipients; TLS where the server offers it, and always before a password."""
        message = EmailMessage()
        message["From"] = self._sender
        message["To"] = ", ".join(self._recipients)
        message["Subject"] = " ".join(_title(incident).split())
        message.set_content(_as_text(incident, self._dashboard_url))
        secure = self._server.scheme == "smtps"
        kind = smtplib.SMTP_SSL if secure else smtplib.SMTP
        host, port = self._server.hostname or "", self._server.port or (465 if secure else 25)
        with kind(host, port, timeout=_TIMEOUT_SECONDS) as server:
            server.ehlo()
            if not secure and (self._server.username or server.has_extn("starttls")):
                server.starttls(context=ssl.create_default_context())
            if self._server.username:
                server.login(unquote(self._server.username), unquote(self._server.password or ""))
            server.send_message(message)


def try_targets(targets: Iterable[Target], now: float) -> list[wire.TriedTarget]:
    """Send one message to each target; the kind of error only, since its text may hold the target's address."""
    incident = wire.Incident(
        incident_id="test",
        alert="CollageTest",
        severity="info",
        source="server",
        state="firing",
        text="This is a test, nothing is wrong: messages about alerts arrive here.",
        started_at=now,
    )
    tried = []
    for target in targets:
        problem = None
        try:
            target.send(incident)
        except Exception as error:
            _LOG.warning("the target %s took no test message (%s)", target.name, type(error).__name__)
            problem = type(error).__name__
        tried.append(wire.TriedTarget(target=target.name, problem=problem))
    return tried


def targets_of(settings: Settings) -> list[Target]:
    """The targets that the settings name; none by default."""
    found: list[Target] = []
    dashboard = settings.dashboard_url
    if settings.alert_webhook:
        found.append(WebhookTarget(settings.alert_webhook, dashboard))
    if settings.alert_slack:
        found.append(SlackTarget(settings.alert_slack, dashboard))
    if settings.alert_smtp and settings.alert_email:
        addresses = [address.strip() for address in settings.alert_email.split(",")]
        found.append(EmailTarget(settings.alert_smtp, addresses[0], addresses, dashboard))
    return found


def _title(incident: wire.Incident) -> str:
    about = f"run {incident.labels.get('run') or incident.run_id}" if incident.run_id else "the server"
    state = "fires" if incident.state == "firing" else "has ended"
    return f"{incident.alert} {state} ({incident.severity}): {about}"


def _page_of(incident: wire.Incident, dashboard_url: str | None) -> str | None:
    """The dashboard's address of the incident; None if the dashboard's address is not set."""
    return None if dashboard_url is None else f"{dashboard_url.rstrip('/')}/incident/{quote(incident.incident_id)}"


def _as_text(incident: wire.Incident, dashboard_url: str | None = None) -> str:
    entry = ALERTS.get(incident.alert)
    lines = [_title(incident), incident.text]
    if page := _page_of(incident, dashboard_url):
        lines.append(page)
    if incident.project:
        about = {"project": incident.project, "run": incident.run_id, "step": incident.step}
        lines.append(", ".join(f"{name} {value}" for name, value in about.items() if value is not None))
    if entry and incident.state == "firing":
        lines += [entry.meaning, f"First: {entry.first_step}"]
    return "\n\n".join(lines)


def _carried(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> list[ipaddress.IPv4Address]:
    """The IPv4 addresses that an IPv6 address leads to."""
    if isinstance(address, ipaddress.IPv4Address):
        return []
    found = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if any(address in network for network in _NAT64):
        found.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return [one for one in found if one is not None]


def _post(url: str, body: dict[str, Any]) -> None:
    asked = httpx.URL(url)
    address = _checked_address(asked.host, asked.port or (443 if asked.scheme == "https" else 80))
    with httpx.Client(follow_redirects=False, trust_env=False, timeout=_TIMEOUT_SECONDS) as client:
        answer = client.post(
            asked.copy_with(host=address),
            content=wire.encode_json(body),
            headers={"Host": asked.netloc.decode(), "Content-Type": wire.JSON},
            extensions={"sni_hostname": asked.host},
        )
    if not answer.is_success:
        raise httpx.HTTPStatusError(
            f"{answer.status_code} of {asked.host}", request=answer.request, response=answer
        )


def _is_unsafe(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return address in _METADATA or address.is_link_local or address.is_multicast or address.is_unspecified


def _checked_address(host: str, port: int) -> str:
    """An address of the host that a message may go to.

    Raises:
        UnsafeAddress: one of its addresses is a cloud's metadata, link-local, multicast or unspecified, also where
            IPv6 carries it: mapped, 6to4, Teredo, or through NAT64.
    """
    found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    for text in found:
        address = ipaddress.ip_address(text.partition("%")[0])
        if any(map(_is_unsafe, (address, *_carried(address)))):
            raise UnsafeAddress(f"{host} leads to {text}, where no message may go; set another address")
    return found[0]
