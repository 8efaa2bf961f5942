"""A language model behind a URL says what outputs answer that no rule could read, beside the figures of the rules."""
