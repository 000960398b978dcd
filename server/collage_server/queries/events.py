"""What an alert of Alertmanager says, as an event of a run."""

from __future__ import annotations

import hashlib
from typing import Final

from collage_monitor import wire
from collage_server.store.contract import NewEvent

__all__ = ["alert_event"]

_MOST_CHARACTERS: Final = 1000


def alert_event(alert: wire.AlertmanagerAlert) -> NewEvent:
    """The event of one alert. Sent again in the same state (Alertmanager repeats itself) it has the same origin."""
    name = alert.labels.get("alertname", "alert")
    said = alert.annotations.get("summary") or alert.annotations.get("description") or ""
    severity = alert.labels.get("severity")
    text = f"{name} {alert.status}" + (f" ({severity})" if severity else "") + (f": {said}" if said else "")
    identity = (
        alert.fingerprint or hashlib.blake2b(repr(sorted(alert.labels.items())).encode(), digest_size=8).hexdigest()
    )
    return NewEvent(
        origin=f"alert/{identity}/{alert.starts_at}/{alert.status}",
        kind="alert" if alert.status == "firing" else "alert_resolved",
        text=text[:_MOST_CHARACTERS],
    )
