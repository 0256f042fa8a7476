"""Workloads: prompts with grammars, and an independent check of what comes out."""
