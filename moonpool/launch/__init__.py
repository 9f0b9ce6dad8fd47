"""The launcher: starts, watches, restarts and stops the roles of one machine."""
