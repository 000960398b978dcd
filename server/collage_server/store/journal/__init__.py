"""The journal: reports of streams, each exactly once, until they are sealed."""
