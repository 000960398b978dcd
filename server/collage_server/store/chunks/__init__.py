"""Sealed points: chunks of 256 points by level, stored as rows with blobs, and an index of the chunks."""
