"""Reads and writes of files and block devices past the page cache. The file transport and the SSD logs use it."""
