"""Replays as one HTML page that opens offline: our own SVG charts, tables under them, the same bytes every time."""
