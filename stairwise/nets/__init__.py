"""Encoders, heads and initialization."""
