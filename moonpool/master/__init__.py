"""The master: where every object of the pool lies. A pure state, its journal, and the service around both."""
