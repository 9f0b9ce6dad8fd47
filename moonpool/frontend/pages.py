"""Serves the live page: the files of moonpool/dashboard at /ui. They are read once, and need no other host.

The page itself holds no data, so it needs no key; what it reads from /v1 does. Its Content-Security-Policy allows
scripts, styles and calls of this origin only, and no page may frame it.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files

from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse, Response

from moonpool.base.errors import NotFound

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # asked again each time, and answered by 304 unless the version changed
}
_INDEX = "index.html"
PATH = "/ui"


def read_pages() -> dict[str, bytes]:
    """Return the files of the page, by name."""
    folder = files("moonpool") / "dashboard"
    return {each.name: each.read_bytes() for each in folder.iterdir() if each.name.rpartition(".")[2] in _TYPES}


def add_pages(app: FastAPI) -> None:
    """Add the page to the app: / and /ui lead to /ui/."""
    pages = read_pages()
    tags = {name: f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"' for name, content in pages.items()}

    @app.get("/", include_in_schema=False)
    @app.get(PATH, include_in_schema=False)
    async def lead() -> Response:
        return RedirectResponse(f"{PATH}/", 307)

    @app.get(PATH + "/{name}", include_in_schema=False)
    @app.get(PATH + "/", include_in_schema=False)
    async def page(request: Request, name: str = _INDEX) -> Response:
        if name not in pages:
            raise NotFound(f"there is no page {name!r}")
        headers = {**_HEADERS, "etag": tags[name]}
        if request.headers.get("if-none-match") == tags[name]:
            return Response(status_code=304, headers=headers)
        return Response(pages[name], headers=headers, media_type=_TYPES[name.rpartition(".")[2]])
