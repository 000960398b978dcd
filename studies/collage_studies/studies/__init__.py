"""One module a study; each holds its `STUDY`."""
