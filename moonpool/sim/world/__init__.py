"""The simulated cluster: production's own cores on a virtual clock."""
