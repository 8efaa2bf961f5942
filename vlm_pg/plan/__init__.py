"""Memory, operations and time of a run, estimated from its configuration and the model's dimensions alone."""
