"""Groups of worker processes: one per rank, launched, called and killed together."""
