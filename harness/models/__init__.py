"""Models: where weights come from, the forward over a ragged cache, verifiers."""
