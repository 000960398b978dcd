"""What stands around every route: the connection, middleware, the read-only gate, failures, the description."""
