"""Read spectra over time: steps, forecast, clock and advice; numpy only."""
