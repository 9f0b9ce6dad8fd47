"""From the ids that clients see to those of decision records. Knows nothing of HTTP, so that the CLI may ask too."""

from __future__ import annotations

_PREFIXES = ("chatcmpl-", "cmpl-")  # of the ids in answers; x-request-id has none


def bare_id(request_id: str) -> str:
    """The id that the conductor knows a client's request by."""
    for prefix in _PREFIXES:
        request_id = request_id.removeprefix(prefix)
    return request_id
