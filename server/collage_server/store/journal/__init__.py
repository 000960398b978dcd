"""What came in: reports of streams, each exactly once, until they are sealed."""
