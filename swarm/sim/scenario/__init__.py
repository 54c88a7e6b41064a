"""Runs that no one has machines for: peers by class, churn, and policies to compare, from a file."""
