"""Who may do what: bearer tokens, roles, quotas, and administrators' actions with their entries in the audit
log."""
