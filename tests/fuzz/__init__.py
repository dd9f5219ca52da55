"""Hostile commands, calls, faults: `python -m tests.fuzz --help`, `make fuzz N=10000`; a few in `make test`."""
