"""Moves bytes between memories: registered segments, several transports, one interface. No torch needed."""
