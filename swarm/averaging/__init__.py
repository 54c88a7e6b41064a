"""Decentralized averaging of a stage's gradients."""
