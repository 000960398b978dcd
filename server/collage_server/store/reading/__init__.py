"""Journal, sealed parts and coarse levels joined to the points of a run."""
