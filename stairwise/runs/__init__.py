"""Runs on disk: records, layout, log, reader and background writer; no torch at import."""
