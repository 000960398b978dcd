"""Who may do what: bearer tokens, roles, quotas, and the acts of administrators."""
