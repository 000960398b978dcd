"""Sealed points: chunks of 256 points by level, as rows of blocks, and what is known without reading one."""
