"""How good an embedding is: probes."""
