"""How many machines, split how, with how large a pool: answers from a trace, with how sure they are. Pure."""
