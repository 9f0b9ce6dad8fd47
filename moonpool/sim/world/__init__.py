"""The simulated cluster: production code on a simulated clock."""
