"""Hostile commands, calls and faults: `python -m tests.fuzz --help`, `make fuzz N=10000`; a few of each in `make test`."""
