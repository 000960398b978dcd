"""A study's page: Markdown with its tables, and its plots as pictures beside it.

It draws what a study's `Page` says, and measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from types import MappingProxyType

import matplotlib

matplotlib.use("agg")

from cycler import cycler
from matplotlib import pyplot, rcParams

from collage_studies.number_words import listed
from collage_studies.study import MarkdownTable, Page, Picture, Plot, Record, Study

__all__ = ["draw", "table_text", "write_page"]

_DOTS_PER_INCH = 110
_NARROW_PRODUCTS = (
    " These trials left products of bfloat16 weights to torch. On a CPU new ones compute them in fp32 and round "
    "once, so their numbers may differ slightly."
)
_TITLE_CHARACTERS = 60
"""Beyond this, a title would run into the legend beside it."""


def write_page(
    study: Study,
    page: Page,
    records: Sequence[Record],
    folder: Path,
    *,
    read: Mapping[str, int] = MappingProxyType({}),
    repeated: Sequence[str | MarkdownTable] = (),
) -> Path:
    """Write FOLDER/NAME.md and its pictures under FOLDER/images; both only from the arguments.

    read: records of other studies that the page rests on, by study, 0 where they are missing. repeated: the section
    on repeats with other seeds.
    """
    parts = [f"# {study.title}", study.short, "## What was found"]
    parts += [text for entry in page.evidence if (text := _entry(entry, folder))]
    parts += ["## The answer in numbers", f"**Question.** {study.question}", f"**Answer.** {page.answer}"]
    if repeated:
        parts += ["## Repeated with other seeds", *(_entry(entry, folder) for entry in repeated)]
    parts += ["## Method", study.method, _made_with(study, records, read)]
    if page.limits:
        parts += ["## Limits", "\n".join(f"- {limit}" for limit in page.limits)]
    written = folder / f"{study.name}.md"
    written.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return written


def _entry(entry: str | MarkdownTable | Plot | Picture, folder: Path) -> str:
    if isinstance(entry, MarkdownTable):
        return table_text(entry)
    if isinstance(entry, Plot):
        return f"![{entry.title}]({draw(entry, folder).relative_to(folder).as_posix()})"
    if isinstance(entry, Picture):
        path = folder / "images" / entry.file
        return f"![{entry.title}](images/{entry.file})" if path.exists() else ""
    return entry


def draw(plot: Plot, folder: Path) -> Path:
    """Draw a plot into FOLDER/images; an interval is a band, one number a dot."""
    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=_DOTS_PER_INCH, layout="constrained")
    # Ten colours as lines, then as dashes, so that no two curves of a page look alike.
    axes.set_prop_cycle(cycler(linestyle=["-", "--"]) * rcParams["axes.prop_cycle"])
    for name, points in plot.curves.items():
        (line,) = axes.plot(points.x, points.y, label=name)
        if not plot.lines:
            line.set(marker="o", linestyle="none")
        colour = line.get_color()
        if points.low and plot.lines:
            axes.fill_between(points.x, points.low, points.high, alpha=0.18, color=colour, linewidth=0)
        elif points.low:
            axes.vlines(points.x, points.low, points.high, alpha=0.5, color=colour)
    axes.set(
        title=fill(plot.title, _TITLE_CHARACTERS),
        xlabel=plot.x,
        ylabel=plot.y,
        xscale=plot.x_scale,
        yscale=plot.y_scale,
    )
    axes.grid(alpha=0.25)
    if len(plot.curves) > 1:
        figure.legend(loc="outside right upper", fontsize="small", frameon=False)
    written = folder / "images" / plot.file
    written.parent.mkdir(parents=True, exist_ok=True)
    # Without the time and version that matplotlib writes, the same data gives the same file.
    figure.savefig(written, metadata={"Software": None})
    pyplot.close(figure)
    return written


def table_text(table: MarkdownTable) -> str:
    """The table in Markdown."""
    lines = [table.head, ["---"] * len(table.head), *table.rows]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    return f"{table.caption}\n\n{text}" if table.caption else text


def _made_with(study: Study, records: Sequence[Record], read: Mapping[str, int]) -> str:
    seconds = sum(record.cpu_seconds for record in records)
    versions = sorted({f"{name} {version}" for record in records for name, version in record.versions.items()})
    products = "" if all("products" in record.versions for record in records) else _NARROW_PRODUCTS
    took = f"{seconds / 60:.0f} CPU minutes" if seconds >= 120 else f"{seconds:.0f} CPU seconds"
    others = [
        f"[{name}]({name}.md) ({count} trials)" if count else f"{name} (not run: missing here)"
        for name, count in read.items()
    ]
    more = f" The page also reads the records of {listed(others)}." if others else ""
    return (
        f"`python -m collage_studies {study.name}`: {len(records)} trials, {took}; {', '.join(versions)}. "
        f"This page is drawn from [`data/{study.name}.jsonl`](data/{study.name}.jsonl).{more}{products}"
    )
