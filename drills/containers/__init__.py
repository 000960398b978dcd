"""The shipped Compose file, run for real: `make containers`."""
