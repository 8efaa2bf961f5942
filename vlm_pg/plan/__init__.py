"""How much memory a run will take, from its configuration and the model's dimensions alone."""
