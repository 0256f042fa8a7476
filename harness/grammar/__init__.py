"""Grammars: what a request asks for, the matcher contract, one adapter per grammar engine."""
