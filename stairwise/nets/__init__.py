"""Encoders, heads, initialization."""
