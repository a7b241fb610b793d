"""Shared pieces of the tests: a tiny model, recipes and groups made by hand."""
