"""Benches, trace replay and the reference engine."""
