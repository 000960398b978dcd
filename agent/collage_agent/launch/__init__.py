"""This process in its launch: its identity, how ranks agree on ids, and what SIGTERM does."""
