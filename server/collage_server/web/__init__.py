"""What stands around every route: middleware, the read-only gate, failures as answers, the description."""
