"""The training as this process has it: parameters under their names, shards, sub-groups, steps that scaling left out."""
