"""The training as this process has it: parameters and their names, shards, sub-groups, scaled steps left out."""
