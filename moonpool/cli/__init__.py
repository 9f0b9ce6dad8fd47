"""One small file per command. A command's module is imported only when that command is run."""
