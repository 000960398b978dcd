"""Studies of low precision, run from a checkout: `python -m collage_studies NAME`."""
