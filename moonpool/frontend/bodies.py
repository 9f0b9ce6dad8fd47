"""From the bytes of a request body to a checked body of schema.py. Whatever the bytes are, the outcome is a body or
an InvalidInput that names the field and, for numbers, the range that is allowed.

The content type does not matter: `curl -d` without a header says that it sends a form, and sends JSON.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from moonpool.base.errors import InvalidInput
from moonpool.frontend.fields import shown_name

_B = TypeVar("_B", bound=BaseModel)
_RANGE_ERRORS = frozenset({"greater_than", "greater_than_equal", "less_than", "less_than_equal", "int_parsing_size"})
_OBJECT = "must be a JSON object"
_WORDS = {"extra_forbidden": "unknown field", "model_type": _OBJECT, "dict_type": _OBJECT}  # clearer than pydantic's
_HOW_TO_SEND = "send a JSON object, e.g. curl -H 'Content-Type: application/json' -d '{...}'"


def decode_json(raw: bytes) -> Any:
    """Return the value that `raw` holds as JSON; InvalidInput if it holds none."""
    try:
        return json.loads(raw)
    except json.JSONDecodeError as error:
        raise InvalidInput(
            f"the body is not valid JSON: {error.msg} at character {error.pos}; {_HOW_TO_SEND}"
        ) from None
    except UnicodeDecodeError:
        raise InvalidInput(f"the body is not valid JSON: it is not UTF-8 text; {_HOW_TO_SEND}") from None
    except RecursionError:
        raise InvalidInput("the body is not valid JSON: its values are nested too deeply") from None
    except ValueError:  # Python refuses to convert integers of thousands of digits
        raise InvalidInput("the body is not valid JSON: a number has too many digits") from None


def validated(model: type[_B], data: Any) -> _B:
    """Return `data` as an instance of `model`; InvalidInput names the first thing that is wrong."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _invalid(error, model) from None


def _invalid(error: ValidationError, model: type[BaseModel]) -> InvalidInput:
    try:
        first = error.errors(include_url=False, include_input=False)[0]
    except UnicodeEncodeError:  # pydantic cannot show such a name
        return InvalidInput("a field's name holds half a surrogate pair, which is no character")
    message, param = complaint(first, first["loc"], model)
    return InvalidInput(message, param=param)


def complaint(
    error: Mapping[str, Any], path: Sequence[int | str], model: type[BaseModel] | None = None
) -> tuple[str, str | None]:
    """Return (message, param) of one of pydantic's errors at `path`. The input itself is not repeated."""
    field = error.get("ctx", {}).get("field")  # such a message names it already
    steps = [*path, field] if field is not None else list(path)
    where, param = _joined(path), _joined(steps)
    text = _WORDS.get(error["type"], str(error["msg"]))
    if model is not None and steps and error["type"] in _RANGE_ERRORS:
        text += _allowed(model, str(steps[0]))
    return (f"{where}: {text}" if where else text), param


def _joined(steps: Sequence[int | str]) -> str | None:
    return ".".join(shown_name(str(step)) for step in steps) or None


def _allowed(model: type[BaseModel], name: str) -> str:
    low, high = _ranges(model).get(name, (None, None))
    return "" if low is None or high is None else f" (allowed: {low} to {high})"


@functools.cache
def _ranges(model: type[BaseModel]) -> dict[str, tuple[Any, Any]]:
    """The smallest and the largest number that each field, or an element of it, may be."""
    return {name: _limits(schema) for name, schema in model.model_json_schema()["properties"].items()}


def _limits(schema: Mapping[str, Any]) -> tuple[Any, Any]:
    for option in (schema, *schema.get("anyOf", ()), *(part.get("items", {}) for part in schema.get("anyOf", ()))):
        if "minimum" in option:
            return option["minimum"], option.get("maximum")
    return None, None
