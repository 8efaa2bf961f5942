"""How groups are cut into micro-batches under a token budget."""
