"""Probes that measure the quality of an embedding."""
