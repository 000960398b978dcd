"""Faults that a maintainer could make, planted one at a time: do the tests of the room turn red? `make mutants`."""
