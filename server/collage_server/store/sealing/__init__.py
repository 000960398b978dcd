"""From journal to chunks, and from chunks to less: sealing, replicas compared, retention."""
