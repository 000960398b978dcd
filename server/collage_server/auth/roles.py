"""Which role may use which route: one table, held complete by a test and printed in docs/access.md.

A route that is missing here does not exist for any token but an administrator's, so a new route fails closed.
`bearer.py` asks it at each request. `tests/server/test_matrix.py` expects what the printed table says.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from re import Pattern
from typing import Final, Literal

from starlette.routing import compile_path

from collage_monitor.wire import ROLES, Role

__all__ = ["Capability", "GRANTS", "RULES", "matched_rule", "matrix"]

Capability = Literal["open", "any", "ingest", "read", "operate", "admin"]
"""What a route needs: nothing, any valid token, or a role that grants it."""

GRANTS: Final[Mapping[Role, frozenset[Capability]]] = {
    "ingest": frozenset({"any", "ingest"}),
    "read": frozenset({"any", "read"}),
    "operate": frozenset({"any", "ingest", "read", "operate"}),
    "admin": frozenset({"any", "ingest", "read", "operate", "admin"}),
}

RULES: Final[Mapping[tuple[str, str], Capability]] = {
    ("GET", "/healthz"): "open",
    ("GET", "/readyz"): "open",
    ("GET", "/docs"): "open",
    ("GET", "/openapi.json"): "open",
    ("GET", "/"): "open",
    ("GET", "/runs/{run_id}"): "open",
    ("GET", "/api/v1/sign-in"): "open",
    ("POST", "/api/v1/back-channel-log-out"): "open",
    ("POST", "/api/v1/sign-in"): "read",
    ("POST", "/api/v1/sessions"): "read",
    ("POST", "/api/v1/sign-out"): "any",
    ("GET", "/metrics"): "read",
    ("GET", "/api/v1/metrics-catalogue"): "any",
    ("GET", "/api/v1/alerts-catalogue"): "any",
    ("POST", "/api/v1/projects/{project}/runs"): "ingest",
    ("POST", "/api/v1/runs/{run_id}/attempts"): "ingest",
    ("POST", "/api/v1/runs/{run_id}/streams"): "ingest",
    ("POST", "/api/v1/streams/{stream_id}/reports"): "ingest",
    ("POST", "/v1/metrics"): "ingest",
    ("POST", "/api/v1/alerts/alertmanager"): "ingest",
    ("POST", "/api/v1/alerts/test"): "admin",
    ("GET", "/api/v1/runs/{run_id}/alerts"): "any",
    ("PATCH", "/api/v1/runs/{run_id}"): "ingest",
    ("DELETE", "/api/v1/runs/{run_id}"): "operate",
    ("POST", "/api/v1/runs/{run_id}/restore"): "operate",
    ("GET", "/api/v1/runs"): "read",
    ("GET", "/api/v1/runs/{run_id}"): "read",
    ("GET", "/api/v1/runs/{run_id}/overview"): "read",
    ("GET", "/api/v1/run-table"): "read",
    ("GET", "/api/v1/run-groups"): "read",
    ("GET", "/api/v1/run-filters"): "read",
    ("GET", "/api/v1/views"): "read",
    ("POST", "/api/v1/projects/{project}/views"): "operate",
    ("DELETE", "/api/v1/projects/{project}/views"): "operate",
    ("GET", "/api/v1/runs/{run_id}/streams"): "read",
    ("GET", "/api/v1/runs/{run_id}/layers"): "read",
    ("GET", "/api/v1/runs/{run_id}/latest"): "read",
    ("GET", "/api/v1/runs/{run_id}/worst"): "read",
    ("GET", "/api/v1/runs/{run_id}/series"): "read",
    ("GET", "/api/v1/runs/{run_id}/heatmap"): "read",
    ("GET", "/api/v1/runs/{run_id}/histogram"): "read",
    ("GET", "/api/v1/runs/{run_id}/events"): "read",
    ("GET", "/api/v1/runs/{run_id}/export"): "read",
    ("GET", "/api/v1/compare"): "read",
    ("GET", "/api/v1/events"): "read",
    ("GET", "/api/v1/events/{incident_id}"): "read",
    ("POST", "/api/v1/runs/{run_id}/notes"): "operate",
    ("POST", "/api/v1/events/{incident_id}/acknowledge"): "operate",
    ("DELETE", "/api/v1/events/{incident_id}/acknowledge"): "operate",
    ("GET", "/api/v1/silences"): "read",
    ("POST", "/api/v1/silences"): "operate",
    ("GET", "/api/v1/tokens"): "admin",
    ("POST", "/api/v1/tokens"): "admin",
    ("DELETE", "/api/v1/tokens/{token_id}"): "admin",
    ("GET", "/api/v1/audit"): "admin",
}


def matched_rule(method: str, path: str) -> tuple[Capability, dict[str, str]] | None:
    """The capability that a request needs and the ids in its path; None without a rule.

    `path` is decoded, as routing sees it.
    """
    for pattern, capability in _PATTERNS.get(method, ()):
        if (match := pattern.match(path)) is not None:
            return capability, match.groupdict()
    return None


def matrix() -> str:
    """The table of routes and roles as Markdown."""
    lines = ["| Route | no token | " + " | ".join(ROLES) + " |", "|---|" + ":-:|" * (len(ROLES) + 1)]
    lines += _rows()
    return "\n".join(lines) + "\n"


def _rows() -> Iterator[str]:
    for (method, path), capability in RULES.items():
        allowed = [capability == "open", *(capability == "open" or capability in GRANTS[role] for role in ROLES)]
        cells = " | ".join("yes" if entry else "–" for entry in allowed)
        yield f"| `{method} {path}` | {cells} |"


def _patterns() -> dict[str, list[tuple[Pattern[str], Capability]]]:
    """Rules by method, as routing matches paths; a project may have a slash in its name."""
    found: dict[str, list[tuple[Pattern[str], Capability]]] = {}
    for (method, template), capability in RULES.items():
        pattern, _, _ = compile_path(template.replace("{project}", "{project:path}"))
        found.setdefault(method, []).append((pattern, capability))
    return found


_PATTERNS: Final = _patterns()

if __name__ == "__main__":
    sys.stdout.write(matrix())
