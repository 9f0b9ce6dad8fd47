"""The request bodies in /openapi.json. The endpoints read their bodies themselves (prompts.py), so FastAPI does not
know their types."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_REF = "#/components/schemas/{model}"


def request_body(model: type[BaseModel]) -> dict[str, Any]:
    """What a route's `openapi_extra` says of its body."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def add_bodies(app: FastAPI, *models: type[BaseModel]) -> None:
    """Adds the types that `request_body` refers to."""
    _, definitions = models_json_schema([(model, "validation") for model in models], ref_template=_REF)
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        described = generate()
        described["components"]["schemas"].update(definitions["$defs"])
        return described

    app.openapi = openapi  # type: ignore[method-assign]
