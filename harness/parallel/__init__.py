"""A target on several devices: every rank runs the same loop, rank 0 decides."""
