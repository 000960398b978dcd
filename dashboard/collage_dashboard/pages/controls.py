"""Controls that several pages share, set from the view and read back into it."""

from __future__ import annotations

from typing import Any, Final

import dash_mantine_components as dmc
from dash import html

from collage_dashboard.view import View

__all__ = ["AXIS_CHOICES", "LIVE_MILLISECONDS", "axis_control", "labelled", "pace", "smoothing_control"]

LIVE_MILLISECONDS: Final = 3000
AXIS_CHOICES: Final = (("step", "Step"), ("tokens", "Tokens"), ("time", "Time"))


def pace(seconds: float) -> int:
    """Milliseconds until the next refresh after one that took `seconds`: a slow server is asked less often."""
    return max(LIVE_MILLISECONDS, round(4000 * seconds))


def axis_control(identifier: str, view: View) -> Any:
    """What the curves run over."""
    data = [{"value": value, "label": label} for value, label in AXIS_CHOICES]
    return labelled("Axis", dmc.SegmentedControl(id=identifier, data=data, value=view.axis, size="xs"))


def smoothing_control(identifier: str, view: View) -> Any:
    """How much the past weighs in logged curves."""
    slider = dmc.Slider(
        id=identifier,
        value=view.smoothing,
        min=0,
        max=0.99,
        step=0.01,
        precision=2,
        size="sm",
        w=180,
        my=9,
        updatemode="mouseup",
    )
    return labelled("Smoothing of logged curves", slider)


def labelled(text: str, control: Any) -> html.Div:
    """A control under its name."""
    return html.Div([dmc.Text(text, size="xs", c="dimmed", mb=2), control])
