"""Distils a draft model from any target: see ``python -m experiments.distill``."""
