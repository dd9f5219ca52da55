"""Results to one HTML page. Nothing is run here."""
