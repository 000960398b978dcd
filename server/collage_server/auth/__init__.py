"""Who may do what: bearer tokens, roles, quotas, and what administrators do, with its entries in the audit log."""
