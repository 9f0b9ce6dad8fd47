"""The front end: the OpenAI API over HTTP, in front of a conductor and its workers.

Importing this package imports no torch and no web framework.
"""

from __future__ import annotations

CHAT_ID, COMPLETION_ID = "chatcmpl-", "cmpl-"  # prefixes of the ids in answers; x-request-id has none


def bare_id(request_id: str) -> str:
    """Return the id by which the conductor knows a request, from the id in its answer or its x-request-id header."""
    return request_id.removeprefix(CHAT_ID).removeprefix(COMPLETION_ID)
