"""Ingest of reports: check, queue, one writer, acknowledge after the commit."""
