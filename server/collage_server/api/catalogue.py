"""Catalogues: everything that has a name."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from collage_monitor import wire
from collage_monitor.metrics import METRICS, SCALARS, STATISTICS
from collage_monitor.strategies import STRATEGIES
from collage_server.api.responses import answer, describes
from collage_server.api.routing import resource_router

__all__ = ["router"]

router = resource_router("catalogues")


@router.get("/metrics-catalogue", **describes(wire.Catalogue))
def metrics_catalogue() -> Response:
    """Metrics, statistics with their merge rules, reserved scalars, strategies."""
    return answer(
        wire.Catalogue(
            metrics=[entry.described() for entry in METRICS.values()],
            statistics=_plain(STATISTICS),
            scalars=_plain(SCALARS),
            strategies=_plain(STRATEGIES),
        )
    )


@router.get("/alerts-catalogue", **describes(None))
def alerts_catalogue() -> Response:
    """The alerts: name, condition, window, severity, meaning, first step."""
    alerts = importlib.import_module("collage_monitor.alerts")
    return answer({"alerts": [entry.described() for entry in alerts.ALERTS.values()]})


def _plain(catalogue: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(entry) for entry in catalogue.values()]
