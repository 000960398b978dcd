"""Access kept in the database: tokens, the audit log, and whose a run is."""
