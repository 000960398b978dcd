"""Pages: each has a `layout` for a view and a `register` that binds its callbacks to an application."""

from collage_dashboard.pages import comparison, incident, incidents, run, runs

__all__ = ["comparison", "incident", "incidents", "run", "runs"]
