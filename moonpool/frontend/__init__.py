"""Faces the user: the OpenAI front end, and the launcher that starts, watches, restarts and stops all roles.

Importing this package imports no torch and no web framework.
"""
