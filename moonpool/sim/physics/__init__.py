"""What things cost in the simulated world: models, machines, cost of steps, shared links, the event queue. Pure."""
