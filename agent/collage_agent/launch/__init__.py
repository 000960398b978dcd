"""This process in its launch: who reports, how the ranks agree on one word, and how it ends when it is told to."""
