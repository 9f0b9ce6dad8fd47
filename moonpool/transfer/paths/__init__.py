"""Several paths to one peer: which slice takes which path (pure), and the threads that follow the decision."""
