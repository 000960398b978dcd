"""This process's share of the training: parameters and their names, shards, sub-groups, skipped steps."""
