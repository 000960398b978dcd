"""A figure as SVG: what the report shows, which opens without a script and is small enough to send.

It draws what the figures of this folder are made of: lines, bands, points, bars, cells, and marks beside them
(`tests/dashboard/figures/test_picture.py`).
"""

from __future__ import annotations

import base64
import math
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from html import escape, unescape
from typing import Any, Final

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from collage_dashboard.figures.style import DASHES, INK

__all__ = ["coloured", "picture", "png", "png_address", "rgb"]

_LETTER: Final = 6.2
"""The mean width of a letter, in pixels."""
_ABOUT_TICKS: Final = (6, 5)
_SPARE: Final = 0.06
"""Of a scale, beyond what it shows."""
_STROKES: Final = dict(zip(DASHES, ("", "6 4", "2 3", "6 3 2 3", "10 4", "10 3 2 3"), strict=True))
_ANCHORS: Final = {"left": "start", "right": "end", "center": "middle", None: "middle"}


def picture(figure: go.Figure, label: str, width: float) -> str:
    """The figure as an `<svg>` that fills its place, `width` pixels wide at its own scale; `label` says what it is.

    It has one ink for light and dark ground. All text is escaped. A heatmap's cells are an embedded PNG.
    """
    return "".join(_Drawing(figure, width).drawn(label))


class _Drawing:
    """The places of a figure's parts, in pixels."""

    def __init__(self, figure: go.Figure, width: float) -> None:
        written = figure.to_plotly_json()
        # Its arrays are packed.
        told = zip(written["data"], figure.data, strict=True)
        self.traces: list[dict[str, Any]] = [{**trace, "z": getattr(own, "z", ())} for trace, own in told]
        self.layout = written["layout"]
        self.marks, self.notes = self.layout.get("shapes", ()), self.layout.get("annotations", ())
        self.axes = [self.layout.get(name, {}) for name in ("xaxis", "yaxis")]
        self.ends = [self._ends(place) for place in (0, 1)] if self.traces else [(0.0, 1.0)] * 2
        labels = [len(_plain(text)) for _, text in self._ticks(1)] if self.traces else [0]
        self.width, self.height, margin = width, self.layout["height"], self.layout["margin"]
        left = max(
            margin["l"],
            _LETTER * max(labels, default=0) + (24 if self.axes[1].get("title", {}).get("text") else 12),
        )
        beside = 70 if any(trace["type"] == "heatmap" for trace in self.traces) else 0
        self.box = (left, margin["t"], width - margin["r"] - beside, self.height - margin["b"])

    def drawn(self, label: str) -> Iterator[str]:
        """The parts of the picture, from the ground up."""
        yield f'<svg viewBox="0 0 {self.width:g} {self.height:g}" role="img" aria-label="{escape(label)}">'
        if self.traces:
            yield from self._scales()
        for mark in self.marks:
            yield self._mark(mark)
        for trace in self.traces:
            yield from {"heatmap": self._cells, "bar": self._bars}.get(trace["type"], self._points)(trace)
        for note in self.notes:
            yield from self._note(note)
        if title := self.layout.get("title", {}).get("text"):
            yield _text(self.box[0], 13, title, "start")
        yield "</svg>"

    def _ends(self, place: int) -> tuple[float, float]:
        """Both ends of a scale; of a logarithmic one the exponents."""
        axis, name = self.axes[place], "xy"[place]
        if axis.get("type") == "category":
            rows = len(self.traces[0]["y"])
            return rows - 0.5, -0.5
        if axis.get("range"):
            return tuple(axis["range"])
        values = [value for trace in self.traces for value in trace[name]]
        if self.traces[0]["type"] == "heatmap":
            half = (values[-1] - values[0]) / max(2 * len(values) - 2, 1) or 0.5
            return values[0] - half, values[-1] + half
        values += [
            mark[f"{name}{end}"] for mark in self.marks if mark.get(f"{name}ref", name) == name for end in "01"
        ]
        options = axis.get("autorangeoptions", {})
        values += [*options.get("include", ()), *([0.0] if axis.get("rangemode") == "tozero" else [])]
        shown = [self._scaled(place, value) for value in values if value is not None]
        shown = [value for value in shown if math.isfinite(value)] or [0.0, 1.0]
        low, high = min(shown), max(shown)
        spare = _SPARE * (high - low) or 0.5
        bottom = low if axis.get("rangemode") == "tozero" else low - spare
        return options.get("clipmin", bottom), options.get("clipmax", high + spare)

    def _scaled(self, place: int, value: float) -> float:
        if self.axes[place].get("type") != "log":
            return float(value)
        return math.log10(value) if value > 0 else math.nan

    def at(self, place: int, value: float, reference: str = "") -> float:
        """Where a value of the x (0) or y (1) axis stands; of another reference, where this share of it does."""
        ends = (self.box[0], self.box[2]) if place == 0 else (self.box[3], self.box[1])
        if reference not in {"", "x", "y"}:
            share = value
        else:
            low, high = self.ends[place]
            share = (self._scaled(place, value) - low) / (high - low)
        return float(ends[0] + share * (ends[1] - ends[0]))

    def _scales(self) -> Iterator[str]:
        """Lines and numbers of both scales, and their titles."""
        left, top, right, bottom = self.box
        for place, axis in enumerate(self.axes):
            for value, text in self._ticks(place):
                at = self.at(place, value)
                ends = (at, top, at, bottom) if place == 0 else (left, at, right, at)
                if axis.get("showgrid", True):
                    yield _line(ends, INK, 1, opacity=0.2)
                yield _text(at, bottom + 15, text, "middle") if place == 0 else _text(left - 6, at + 4, text, "end")
            title, middle = axis.get("title", {}).get("text") or "", (top + bottom) / 2
            turn = f' transform="rotate(-90 12 {middle:.1f})"'
            yield (
                _text((left + right) / 2, bottom + 34, title, "middle")
                if place == 0
                else _text(12, middle, title, "middle", turn)
            )

    def _ticks(self, place: int) -> Iterable[tuple[float, str]]:
        axis, (low, high) = self.axes[place], sorted(self.ends[place])
        if axis.get("type") == "category":
            names = list(self.traces[0]["y"])
            return [
                (names.index(name), text) for name, text in zip(axis["tickvals"], axis["ticktext"], strict=True)
            ]
        if axis.get("tickvals"):
            return zip(axis["tickvals"], axis["ticktext"], strict=True)
        if axis.get("type") == "log" and math.floor(high) > math.ceil(low):
            return [(10.0**power, f"10<sup>{power}</sup>") for power in range(math.ceil(low), math.floor(high) + 1)]
        if axis.get("type") == "log":
            low, high = 10.0**low, 10.0**high
        size = 10 ** math.floor(math.log10((high - low) / _ABOUT_TICKS[place]))
        step = next(size * by for by in (1, 2, 5, 10) if (high - low) / (size * by) <= _ABOUT_TICKS[place])
        values = [step * count for count in range(math.ceil(low / step), math.floor(high / step) + 1)]
        return [(value, f"{value:,.6g}{axis.get('ticksuffix') or ''}".replace("-", "−")) for value in values]

    def _points(self, trace: dict[str, Any]) -> Iterator[str]:
        """A line or a band, and points with what they say."""
        line, marker = trace.get("line", {}), trace.get("marker", {})
        points = [
            None if x is None or y is None else (self.at(0, x), self.at(1, y))
            for x, y in zip(trace["x"], trace["y"], strict=True)
        ]
        points = [point if point and math.isfinite(point[1]) else None for point in points]
        colour = line.get("color") or marker.get("color") or INK
        if "lines" in trace["mode"]:
            fill = trace.get("fillcolor") or "none"
            look = f'fill="{fill}" stroke="{colour}" stroke-width="{line.get("width", 2)}"'
            look += f' stroke-dasharray="{_STROKES[line.get("dash", "solid")]}" opacity="{trace.get("opacity", 1)}"'
            yield f'<path d="{_path(points, line.get("shape"))}" {look}/>'
        sizes = marker.get("size", 6) if "markers" in trace["mode"] else 0
        said = trace.get("customdata") or [""] * len(points)
        for place, point in enumerate(points):
            radius = (sizes[place] if isinstance(sizes, Sequence) else sizes) / 2
            if point and radius:
                yield from self._bounds(trace, point, place)
                fill = "none" if "open" in marker.get("symbol", "") else colour
                ring = marker.get("line", {}).get("width", 0)
                edge = marker["line"]["color"] if ring else colour
                look = f'fill="{fill}" stroke="{edge}" stroke-width="{ring or 1.5}"'
                told = f"<title>{escape(_plain(said[place]))}</title>"
                yield f'<circle cx="{point[0]:.1f}" cy="{point[1]:.1f}" r="{radius:g}" {look}>{told}</circle>'
        if "text" in trace["mode"] and (point := points[0]):
            vertical, side = trace["textposition"].split()
            away, anchor = {"left": (-9, "end"), "right": (9, "start"), "center": (0, "middle")}[side]
            down = {"top": -9, "middle": 4, "bottom": 17}[vertical]
            yield _text(point[0] + away, point[1] + down, trace["text"][0], anchor)

    def _bounds(self, trace: dict[str, Any], point: tuple[float, float], place: int) -> Iterator[str]:
        """The interval of a point along each axis, as far as the picture reaches."""
        for way in (0, 1):
            if (bar := trace.get(f"error_{'xy'[way]}")) is None:
                continue
            middle, reach = trace["xy"[way]][place], bar["array"][place]
            low, high = sorted((self.box[way], self.box[way + 2]))
            ends = [min(max(self.at(way, middle + side * reach), low), high) for side in (-1, 1)]
            yield _line(
                (ends[0], point[1], ends[1], point[1]) if way == 0 else (point[0], ends[0], point[0], ends[1]),
                bar["color"],
                1.5,
            )

    def _bars(self, trace: dict[str, Any]) -> Iterator[str]:
        half = trace["width"] / 2
        told = (trace["x"], trace["y"], trace["marker"]["color"], trace["customdata"])
        for x, y, colour, said in zip(*told, strict=True):
            sides = _sides(self.at(0, x - half), self.at(1, y), self.at(0, x + half), self.at(1, 0))
            yield f'<rect {sides} fill="{colour}"><title>{escape(_plain(said))}</title></rect>'

    def _cells(self, trace: dict[str, Any]) -> Iterator[str]:
        """The cells as an image, a pixel a column of the picture and a row a layer; beside it the scale."""
        left, top, right, bottom = self.box
        places, cells = np.array(trace["x"], dtype=np.float64), np.array(trace["z"], dtype=np.float64)
        low, high = self.ends[0]
        asked = low + (np.arange(int(right - left)) + 0.5) / int(right - left) * (high - low)
        columns = np.searchsorted((places[1:] + places[:-1]) / 2, asked)
        stops = [(share, rgb(colour)) for share, colour in trace["colorscale"]]
        levels = (cells[:, columns] - trace["zmin"]) / (trace["zmax"] - trace["zmin"])
        yield _image(coloured(levels, stops), left, top, right, bottom)
        yield _image(coloured(np.linspace(1, 0, 120)[:, None], stops), right + 12, top, right + 22, top + 120)
        for share in (0.0, 0.5, 1.0):
            value = trace["zmin"] + share * (trace["zmax"] - trace["zmin"])
            suffix = (trace.get("colorbar") or {}).get("ticksuffix") or ""
            yield _text(right + 26, top + 120 * (1 - share) + 4 + 4 * (share - 0.5), f"{value:g}{suffix}", "start")

    def _mark(self, mark: dict[str, Any]) -> str:
        """A line or a rectangle across the picture."""
        xs = [self.at(0, mark[f"x{end}"], mark.get("xref", "")) for end in "01"]
        ys = [self.at(1, mark[f"y{end}"], mark.get("yref", "")) for end in "01"]
        line = mark.get("line", {})
        if mark["type"] == "line":
            ends = (xs[0], ys[0], xs[1], ys[1])
            return _line(ends, line.get("color", INK), line.get("width", 1), line.get("dash"))
        return f'<rect {_sides(min(xs), min(ys), max(xs), max(ys))} fill="{mark.get("fillcolor", "none")}"/>'

    def _note(self, note: dict[str, Any]) -> Iterator[str]:
        x, y = (self.at(place, note["xy"[place]], note.get(f"{'xy'[place]}ref", "")) for place in (0, 1))
        down = {"top": 12, "bottom": -4}.get(note.get("yanchor") or "", 4) - (note.get("yshift") or 0)
        said = f"<title>{escape(_plain(note['hovertext']))}</title>" if note.get("hovertext") else ""
        for line, text in enumerate(note["text"].split("<br>")):
            yield _text(x, y + down + 14 * line, text, _ANCHORS[note.get("xanchor")], title=said)


def _path(points: Sequence[tuple[float, float] | None], shape: str | None) -> str:
    """The line through the points, with a gap where there is none; `hvh`: in steps halfway between them."""
    parts, before = [], None
    for point in points:
        if point and before and shape == "hvh":
            parts.append(f"H{(before[0] + point[0]) / 2:.1f}V{point[1]:.1f}H{point[0]:.1f}")
        elif point:
            parts.append(f"{'L' if before else 'M'}{point[0]:.1f} {point[1]:.1f}")
        before = point
    return "".join(parts)


def _line(ends: tuple[float, ...], colour: str, width: float, dash: str | None = None, opacity: float = 1) -> str:
    x1, y1, x2, y2 = (f"{end:.1f}" for end in ends)
    look = f'stroke="{colour}" stroke-width="{width}" stroke-dasharray="{_STROKES[dash or "solid"]}"'
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" {look} opacity="{opacity}"/>'


def _sides(left: float, top: float, right: float, bottom: float) -> str:
    return f'x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}"'


def _text(x: float, y: float, text: str, anchor: str, more: str = "", title: str = "") -> str:
    """A line of text; of the HTML in it bold and raised letters stay."""
    styles = {"<b>": '<tspan font-weight="bold">', "<sup>": '<tspan baseline-shift="super" font-size="8">'}
    styles |= {"</b>": "</tspan>", "</sup>": "</tspan>"}
    parts = re.split(r"(</?(?:b|sup)>)", text)
    words = "".join(styles.get(part) or escape(unescape(part)) for part in parts)
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{words}{title}</text>' if text else ""


def _plain(text: str) -> str:
    """The words of a text without its HTML."""
    return unescape(re.sub(r"</?(?:b|sup)>", "", text.replace("<br>", ", ").replace("<sup>", "^")))


def rgb(colour: str) -> tuple[int, ...]:
    """Red, green and blue of '#RRGGBB'."""
    return tuple(int(colour[place : place + 2], 16) for place in (1, 3, 5))


def coloured(levels: NDArray[np.float64], stops: Sequence[tuple[float, tuple[int, ...]]]) -> NDArray[np.uint8]:
    """RGBA [rows, columns, 4] of levels in [0, 1] on the scale of these stops; NaN is transparent."""
    places, colours = zip(*stops, strict=True)
    # The second of two stops at one place begins there.
    shares = [share - 1e-9 * (share in places[place + 1 :]) for place, share in enumerate(places)]
    channels = [np.interp(levels, shares, [colour[channel] for colour in colours]) for channel in range(3)]
    opaque = np.where(np.isnan(levels), 0, 255)
    return np.stack([*(np.nan_to_num(channel) for channel in channels), opaque], axis=-1).astype(np.uint8)


def _image(pixels: NDArray[np.uint8], *sides: float) -> str:
    """An image RGBA [rows, columns, 4] between its sides."""
    look = 'preserveAspectRatio="none" style="image-rendering: pixelated"'
    return f'<image href="{png_address(pixels)}" {_sides(*sides)} {look}/>'


def png_address(pixels: NDArray[np.uint8]) -> str:
    """An image RGBA [rows, columns, 4] as the address of a PNG, which holds it."""
    return f"data:image/png;base64,{base64.b64encode(png(pixels)).decode()}"


def png(pixels: NDArray[np.uint8]) -> bytes:
    """An image RGBA [rows, columns, 4] as PNG (RFC 2083: signature, header, data, end)."""
    rows, columns, _ = pixels.shape
    filtered = np.concatenate([np.zeros((rows, 1), np.uint8), pixels.reshape(rows, -1)], axis=1)
    blocks = (
        (b"IHDR", struct.pack(">IIBBBBB", columns, rows, 8, 6, 0, 0, 0)),
        (b"IDAT", zlib.compress(filtered.tobytes(), 9)),
        (b"IEND", b""),
    )
    written = b"\x89PNG\r\n\x1a\n"
    for kind, data in blocks:
        written += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return written
