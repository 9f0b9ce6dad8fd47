"""Decision records: one per request, kept, explained and exported."""
