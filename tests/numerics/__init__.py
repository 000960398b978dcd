"""Tests of formats, transformations and expansions."""
