"""Data parallelism: one run, its requests shared out over several processes (``engine.dp``)."""
