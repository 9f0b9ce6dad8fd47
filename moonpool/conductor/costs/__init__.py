"""What things cost: models that learn, how good they have been, and where fetching beats computing."""
