"""The shadow of `mooncake` for tests: Moonpool's store, writing down what went through it."""
