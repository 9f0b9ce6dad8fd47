"""Between machines: our own binary protocol over a few connections per peer."""
