"""Simulated gradient flow and descent: of the linear model, of the quartic family and of single modes."""
