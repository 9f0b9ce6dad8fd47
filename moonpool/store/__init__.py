"""The pool: objects under keys, in memory that nodes offer, placed and remembered by one master. No torch needed."""
