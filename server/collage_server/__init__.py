"""The server: takes reports in, keeps them durably, answers questions about them."""
