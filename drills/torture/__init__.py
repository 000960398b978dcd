"""Durability shown on real processes: system calls traced, logs truncated, servers and databases killed."""
