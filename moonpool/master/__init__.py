"""The master: it knows where every object of the pool is. A pure state, its journal, and the service around both."""
