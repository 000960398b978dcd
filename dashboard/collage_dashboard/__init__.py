"""The dashboard of Collage Monitor: pages in the browser, read from a server over HTTP."""

from collage_dashboard.app import create_dashboard

__all__ = ["create_dashboard"]
