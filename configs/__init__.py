"""Hydra's config groups: values only; the types are dataclasses beside the code."""
