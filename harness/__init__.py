"""A harness for one question: how should a grammar and a draft model share a decode loop?"""

__version__ = "0.1.0"
