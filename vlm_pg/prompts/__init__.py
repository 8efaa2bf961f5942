"""From a sample and its decoded media to the tokens, pixels and positions the model reads."""
