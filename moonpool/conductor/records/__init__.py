"""What became of each request: kept, explained and written out as a trace."""
