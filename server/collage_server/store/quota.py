"""Counting what a project holds, inside the transaction that adds to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from sqlalchemy import Connection, func, select

from collage_server.store import schema

__all__ = ["CountedRows", "QuotaCheck", "judge"]

CountedRows = Literal["runs", "tags"]
QuotaCheck = Callable[[str, CountedRows, int], None]
"""(project, what, how many there would be): raises where that is too many, which undoes the change."""


def judge(connection: Connection, project: str, check: QuotaCheck, *, runs: bool, tags: bool) -> None:
    """Show `check` what this transaction has made of the project. The caller keeps others from adding meanwhile."""
    run, tag = schema.run, schema.run_tag
    if runs:
        count = select(func.count()).select_from(run).where(run.c.project == project)
        check(project, "runs", connection.execute(count).scalar_one())
    if tags:
        mine = select(run.c.run_id).where(run.c.project == project)
        count = select(func.count(tag.c.tag.distinct())).where(tag.c.run_id.in_(mine))
        check(project, "tags", connection.execute(count).scalar_one())
