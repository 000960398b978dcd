"""The way in: check, queue, one writer, acknowledge after the commit."""
