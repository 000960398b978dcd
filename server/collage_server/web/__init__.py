"""Middleware around every route: request ids, logs, access, the read-only gate, and failures as answers."""
