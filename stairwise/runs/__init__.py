"""What a run is on disk: records, layout, log, reader and the background writer. No torch at import."""
