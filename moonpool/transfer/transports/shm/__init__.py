"""Between processes of one machine: the memory itself, passed over a Unix socket."""
