"""Predictions before training."""
