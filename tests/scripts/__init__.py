"""Checks that take minutes; see README.md."""
