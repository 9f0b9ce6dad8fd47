"""Decides where each request runs. Pure policy over an index of who holds which prefix; one thin service."""
