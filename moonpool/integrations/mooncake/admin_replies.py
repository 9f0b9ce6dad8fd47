"""The replies of the admin HTTP server (master_admin.py), in upstream's fields and codes. Pure."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from enum import IntEnum
from http import HTTPStatus
from typing import Any

import msgspec

from moonpool.base.errors import InvalidInput, MoonpoolError, NotFound
from moonpool.base.metrics import MetricFamily, MetricSample
from moonpool.integrations.mooncake.codes import ErrorCode, code_of
from moonpool.integrations.mooncake.http_service import JSON, TEXT, HttpHandler, HttpRequest, HttpResponse
from moonpool.integrations.mooncake.segment_names import endpoint_of
from moonpool.store import messages as m

_SEGMENT_NOT_FOUND = -101
_TENANT = "default"


class SegmentStatus(IntEnum):
    OK = 1
    DRAINING = 2
    DRAINED = 3
    UNMOUNTING = 5


_SEGMENT_STATUS = {"ok": SegmentStatus.OK, "draining": SegmentStatus.DRAINING, "drained": SegmentStatus.DRAINED}
NO_ERROR = {"error_code": 0, "error_message": ""}
NO_DISKS = {"disk_values": None, "local_disk_values": None, "nof_values": None}
NO_EVENTS = {
    "enabled": False,
    "published_batches": 0,
    "published_events": 0,
    "dropped_events": 0,
    "skipped_unparsed_keys": 0,
}


def guarded(answer: Callable[[HttpRequest], HttpResponse | Awaitable[HttpResponse]]) -> HttpHandler:
    """Return a handler that answers errors of ours with upstream's codes."""

    async def handle(request: HttpRequest) -> HttpResponse:
        try:
            found = answer(request)
            return await found if inspect.isawaitable(found) else found
        except NotFound as error:
            return failed_reply(HTTPStatus.NOT_FOUND, ErrorCode.OBJECT_NOT_FOUND, str(error))
        except InvalidInput as error:
            return failed_reply(HTTPStatus.BAD_REQUEST, ErrorCode.INVALID_PARAMS, str(error))
        except MoonpoolError as error:
            return failed_reply(HTTPStatus.INTERNAL_SERVER_ERROR, code_of(error), str(error))

    return handle


def no_quotas(_: HttpRequest) -> HttpResponse:
    return failed_reply(HTTPStatus.NOT_IMPLEMENTED, ErrorCode.NOT_SUPPORTED, "tenants have no quotas here")


def no_segment() -> HttpResponse:
    return failed_reply(HTTPStatus.NOT_FOUND, _SEGMENT_NOT_FOUND, "SEGMENT_NOT_FOUND")


def segment_status(segment: m.SegmentStats) -> SegmentStatus:
    """Segments whose node is silent are on their way out."""
    return _SEGMENT_STATUS.get(segment.status, SegmentStatus.UNMOUNTING)


def placed_reply(info: m.ObjectInfo, tiers: dict[str, m.Tier]) -> dict[str, Any]:
    in_memory = [each for each in info.replicas if tiers.get(each.segment) is not m.Tier.SSD]
    on_disk = [each for each in info.replicas if tiers.get(each.segment) is m.Tier.SSD]
    values = [
        {
            "size_": info.nbytes,
            "buffer_address_": each.offset,
            "protocol_": "tcp",
            "transport_endpoint_": endpoint_of(each.segment),
        }
        for each in in_memory
    ]
    disks = [
        {"client_id": each.segment, "object_size": info.nbytes, "transport_endpoint": each.segment} for each in on_disk
    ]
    return {"ok": True, "error": None, "values": values or None, **NO_DISKS, "local_disk_values": disks or None}


def upstream_metrics(stats: m.StoreStats) -> list[MetricFamily]:
    values = {
        "master_allocated_bytes": ("bytes of memory in use", stats.used_nbytes),
        "master_total_capacity_bytes": ("bytes of memory", stats.capacity_nbytes),
        "master_key_count": ("objects", stats.num_objects),
    }
    return [
        MetricFamily(name, text, "gauge", [MetricSample(name, {}, value)]) for name, (text, value) in values.items()
    ]


def tcp_endpoint(endpoints: Sequence[str]) -> str:
    return next((each.removeprefix("tcp:") for each in endpoints if each.startswith("tcp:")), "")


def namespace(request: HttpRequest) -> bytes:
    return f"mooncake/{request.query.get('tenant_id') or _TENANT}/".encode()


def json_reply(value: object, status: HTTPStatus = HTTPStatus.OK) -> HttpResponse:
    return HttpResponse(status, msgspec.json.encode(value), JSON)


def failed_reply(status: HTTPStatus, code: int, message: str) -> HttpResponse:
    return json_reply({"success": False, "error_code": int(code), "error_message": message}, status)


def text_reply(text: str, status: HTTPStatus = HTTPStatus.OK) -> HttpResponse:
    return HttpResponse(status, text.encode(), TEXT)
