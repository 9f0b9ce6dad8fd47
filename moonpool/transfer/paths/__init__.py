"""Which slice is moved next and by which path (pure), and the threads that do it."""
