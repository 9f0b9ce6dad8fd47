"""Decides where each request runs and whether it is admitted: a pure state with policies, and one thin service."""
