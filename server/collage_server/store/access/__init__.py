"""Access kept in the database: tokens, the audit log, and which project owns a run."""
