"""Turn results into one HTML page; nothing is computed or trained here."""
