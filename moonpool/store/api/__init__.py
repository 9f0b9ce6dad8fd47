"""What a program sees of the pool: `Store`, in plain Python values, over the client."""
