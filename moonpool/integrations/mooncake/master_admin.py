"""The admin HTTP server of upstream's master, on ours: metrics, segments, keys, drain jobs.

Paths, fields and codes are upstream's. Keys are those of one tenant (`tenant_id`, by default "default"). A drain job is
one drain task of the pool per segment; its id is the numbers of these tasks.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from enum import IntEnum
from http import HTTPStatus
from typing import Any

import msgspec

from moonpool.base.backoff import Backoff
from moonpool.base.errors import InvalidInput, NotFound, NotSettled
from moonpool.base.metrics import CONTENT_TYPE, GetMetrics, GetReportedMetrics, RoleMetrics, metrics_text
from moonpool.base.rpc import Call
from moonpool.base.units import format_nbytes
from moonpool.integrations.mooncake.admin_replies import (
    NO_DISKS,
    NO_ERROR,
    NO_EVENTS,
    failed_reply,
    guarded,
    json_reply,
    namespace,
    no_quotas,
    no_segment,
    placed_reply,
    segment_status,
    tcp_endpoint,
    text_reply,
    upstream_metrics,
)
from moonpool.integrations.mooncake.codes import ErrorCode
from moonpool.integrations.mooncake.http_service import TEXT, HttpRequest, HttpResponse, HttpService
from moonpool.integrations.mooncake.segment_names import endpoint_of, segments_of
from moonpool.store import messages as m
from moonpool.store.removal_calls import new_idempotency_key

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.05  # between two questions whether a removal is settled


class JobStatus(IntEnum):
    RUNNING = 2
    SUCCEEDED = 3
    FAILED = 4
    CANCELED = 5


_TASK_STATUS = {
    "running": JobStatus.RUNNING,
    "done": JobStatus.SUCCEEDED,
    "failed": JobStatus.FAILED,
    "cancelled": JobStatus.CANCELED,
}


class DrainRequest(msgspec.Struct, frozen=True):
    segments: list[str]
    target_segments: list[str] = []
    max_concurrency: int = 4


class MasterAdmin:
    """`ask` answers a call of the store's service: the master's own handlers, or a client of another master."""

    def __init__(self, ask: Callable[[Call[Any]], Any]) -> None:
        self._ask = ask

    def service(self) -> HttpService:
        """Return the HTTP server, which does not listen yet."""
        gets: dict[str, Callable[[HttpRequest], HttpResponse | Awaitable[HttpResponse]]] = {
            "/health": self._health,
            "/role": lambda _: text_reply("leader"),
            "/ha_status": lambda _: text_reply("serving"),
            "/leader": lambda _: json_reply({"present": False, "leader_address": None, "view_version": None}),
            "/kv_events/status": lambda _: json_reply(NO_EVENTS),
            "/metrics": self._metrics,
            "/metrics/summary": self._summary,
            "/query_key": self._query_key,
            "/batch_query_keys": self._query_keys,
            "/get_all_keys": self._all_keys,
            "/get_all_segments": lambda _: text_reply("".join(f"{name}\n" for name in self._endpoints())),
            "/get_segments_detail": self._segments_detail,
            "/query_segment": self._query_segment,
            "/api/v1/segments/status": self._segment_status,
            "/api/v1/drain_jobs/query": self._query_job,
            "/api/v1/tenant_quotas": no_quotas,
        }
        posts: dict[str, Callable[[HttpRequest], HttpResponse | Awaitable[HttpResponse]]] = {
            "/api/v1/drain_jobs": self._create_job,
            "/api/v1/drain_jobs/cancel": self._cancel_job,
            "/api/v1/remove_all": self._remove_all,
        }
        routes = {("GET", path): guarded(answer) for path, answer in gets.items()}
        routes |= {("POST", path): guarded(answer) for path, answer in posts.items()}
        routes |= {(method, "/api/v1/tenant_quotas"): guarded(no_quotas) for method in ("PUT", "DELETE")}
        return HttpService(routes)

    # the master

    def _health(self, _: HttpRequest) -> HttpResponse:
        self._stats()
        return json_reply(
            {
                "status": "ok",
                "role": "leader",
                "ha_state": "serving",
                "service_ready": True,
                "leader_address": None,
                "view_version": None,
            }
        )

    def _metrics(self, _: HttpRequest) -> HttpResponse:
        """Our metrics of the master and the nodes, and the three of upstream's that boards need most."""
        own = [*self._ask(GetMetrics()), *upstream_metrics(self._stats())]
        parts = [RoleMetrics("master", "master", own), *self._ask(GetReportedMetrics())]
        return HttpResponse(HTTPStatus.OK, metrics_text(parts), CONTENT_TYPE)

    def _summary(self, _: HttpRequest) -> HttpResponse:
        stats = self._stats()
        used, capacity = format_nbytes(stats.used_nbytes), format_nbytes(stats.capacity_nbytes)
        return text_reply(
            f"role=leader, state=serving, service_ready=true, master={{Mem Storage: {used} / {capacity} | "
            f"Keys: {stats.num_objects} | Segments: {len(stats.segments)}}}"
        )

    def _stats(self) -> m.StoreStats:
        stats: m.StoreStats = self._ask(m.Stats())
        return stats

    # keys

    def _query_key(self, request: HttpRequest) -> HttpResponse:
        (found,) = self._look_up([request.query.get("key", "")], request, lease=True)
        if found is None:
            return failed_reply(HTTPStatus.NOT_FOUND, ErrorCode.OBJECT_NOT_FOUND, "OBJECT_NOT_FOUND")
        return json_reply({"success": True, "data": found["values"] or []})

    def _query_keys(self, request: HttpRequest) -> HttpResponse:
        text = request.query.get("keys", "")
        if not text:
            reason = "No keys provided. Use ?keys=key1,key2,..."
            return json_reply({"success": False, "error": reason}, HTTPStatus.BAD_REQUEST)
        keys = text.split(",")
        missing = {"ok": False, "error": "OBJECT_NOT_FOUND", "values": None, **NO_DISKS}
        found = self._look_up(keys, request, lease=False)
        data = {key: missing if each is None else each for key, each in zip(keys, found, strict=True)}
        return json_reply({"success": True, "data": data})

    def _look_up(self, keys: Sequence[str], request: HttpRequest, *, lease: bool) -> list[dict[str, Any] | None]:
        prefix = namespace(request)
        tiers = {each.name: each.tier for each in self._stats().segments}
        infos = self._ask(m.Lookup([prefix + key.encode() for key in keys], lease=lease, reads=False))
        return [None if info is None else placed_reply(info, tiers) for info in infos]

    async def _all_keys(self, request: HttpRequest) -> HttpResponse:
        prefix = namespace(request)
        pattern, keys = f"^{re.escape(prefix.decode())}", list[bytes]()
        cursor: int | None = 0
        while cursor is not None:
            page: m.ObjectPage = self._ask(m.ListObjects(pattern, cursor))
            keys += [each.key.removeprefix(prefix) + b"\n" for each in page.objects]
            cursor = page.cursor
            await asyncio.sleep(0)  # other callers of the master come between two pages
        return HttpResponse(HTTPStatus.OK, b"".join(keys), TEXT)

    async def _remove_all(self, request: HttpRequest) -> HttpResponse:
        """Without `tenant_id` the keys of all tenants; Moonpool's own objects stay."""
        prefix = namespace(request) if request.query.get("tenant_id") else b"mooncake/"
        force, count = request.query.get("force", "") in ("true", "1"), 0
        cursor: int | None = 0
        while cursor is not None:
            call = m.RemoveMatching(force=force, cursor=cursor, prefix=prefix, idempotency_key=new_idempotency_key())
            removed = await self._ask_until_settled(call)
            count += removed.num_removed
            cursor = removed.cursor
            await asyncio.sleep(0)
        return json_reply({"success": True, "removed_count": count})

    async def _ask_until_settled(self, call: m.RemoveMatching) -> m.RemovedCount:
        """Return the answer when no reader finds the removed objects any more: at the latest when their leases end."""
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            try:
                removed: m.RemovedCount = self._ask(call)
            except NotSettled:
                await asyncio.sleep(backoff.next_s())
            else:
                return removed

    # segments

    def _endpoints(self) -> list[str]:
        """Return the names of memory segments, as clients know them."""
        return sorted({endpoint_of(each.name) for each in self._memory()})

    def _memory(self) -> list[m.SegmentStats]:
        return [each for each in self._stats().segments if each.tier & m.Tier.DRAM]

    def _segments_detail(self, _: HttpRequest) -> HttpResponse:
        descriptors = {each.descriptor.name: each.descriptor for each in self._ask(m.Segments())}
        details = [
            {
                "segment_name": endpoint_of(each.name),
                "segment_id": each.name,
                "client_id": each.node,
                "base_address": "0x0",
                "size_bytes": each.capacity_nbytes,
                "size_human": f"{each.capacity_nbytes / 2**30:g} GiB",
                "te_endpoint": tcp_endpoint(descriptors[each.name].endpoints) if each.name in descriptors else "",
                "protocol": "tcp",
                "status": segment_status(each).name,
                "allocator_used_bytes": each.used_nbytes,
                "allocator_capacity_bytes": each.capacity_nbytes,
                "allocator_usage_percent": 100 * each.used_nbytes / (each.capacity_nbytes or 1),
            }
            for each in self._memory()
        ]
        return json_reply({"total_segments": len(details), "segments": details})

    def _query_segment(self, request: HttpRequest) -> HttpResponse:
        name = request.query.get("segment", "")
        found = self._find(name)
        if not found:
            return text_reply("Failed to query segment", HTTPStatus.INTERNAL_SERVER_ERROR)
        used, capacity = sum(each.used_nbytes for each in found), sum(each.capacity_nbytes for each in found)
        return text_reply(f"{name}\nUsed(bytes): {used}\nCapacity(bytes) : {capacity}\n")

    def _segment_status(self, request: HttpRequest) -> HttpResponse:
        name = request.query.get("segment", "")
        if not name:
            return failed_reply(HTTPStatus.BAD_REQUEST, ErrorCode.INVALID_PARAMS, "Missing segment query parameter")
        found = self._find(name)
        if not found:
            return no_segment()
        status = min(segment_status(each) for each in found)
        return json_reply({"success": True, "segment": name, "status": status, "status_name": status.name, **NO_ERROR})

    def _find(self, endpoint: str) -> list[m.SegmentStats]:
        memory = self._memory()
        names = segments_of(endpoint, [each.name for each in memory])
        return [each for each in memory if each.name in names]

    # drain jobs

    def _create_job(self, request: HttpRequest) -> HttpResponse:
        try:
            job = msgspec.json.decode(request.body, type=DrainRequest)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return failed_reply(HTTPStatus.BAD_REQUEST, ErrorCode.INVALID_PARAMS, f"Invalid JSON body: {error}")
        found = [self._find(name) for name in job.segments]
        if not found:
            return failed_reply(HTTPStatus.BAD_REQUEST, ErrorCode.INVALID_PARAMS, "no segments given")
        if not all(found):
            return no_segment()
        drained = {each.name for segments in found for each in segments}
        targets = {each.name for name in job.target_segments for each in self._find(name)}
        others = {each.name for each in self._memory() if each.status == "ok"} - drained - targets
        if job.target_segments and others:
            # The master chooses where objects go. Other targets than those asked for would be a silent surprise.
            reason = f"target_segments must name all other segments; {endpoint_of(min(others))} is missing"
            return failed_reply(HTTPStatus.BAD_REQUEST, ErrorCode.INVALID_PARAMS, reason)
        tasks = [self._ask(m.DrainSegment(name)) for name in sorted(drained)]
        return json_reply({"success": True, "job_id": "-".join(map(str, tasks)), "status": "CREATED", **NO_ERROR})

    def _query_job(self, request: HttpRequest) -> HttpResponse:
        tasks = self._tasks(request)
        states = [_TASK_STATUS.get(task.state, JobStatus.FAILED) for task in tasks]
        worst = (JobStatus.RUNNING, JobStatus.FAILED, JobStatus.CANCELED, JobStatus.SUCCEEDED)
        status = next(each for each in worst if each in states)
        done, total = sum(task.num_done for task in tasks), sum(task.num_total for task in tasks)
        is_over, now_ms = status is not JobStatus.RUNNING, int(time.time() * 1000)
        return json_reply(
            {
                "success": True,
                "job_id": request.query["job_id"],
                "type": 0,
                "type_name": "DRAIN",
                "status": status,
                "status_name": status.name,
                "created_at_ms_epoch": 0,
                "last_updated_at_ms_epoch": now_ms,
                "segments": [endpoint_of(task.segment) for task in tasks],
                "succeeded_units": done,
                "failed_units": max(0, total - done) if status is JobStatus.FAILED else 0,
                "blocked_units": 0,
                "active_units": 0 if is_over else max(0, total - done),
                "migrated_bytes": sum(task.nbytes_moved for task in tasks),
                "message": "; ".join(task.message for task in tasks if task.message),
                **NO_ERROR,
            }
        )

    def _cancel_job(self, request: HttpRequest) -> HttpResponse:
        for task in self._tasks(request):
            self._ask(m.CancelTask(task.task_id))
        return json_reply({"success": True, "job_id": request.query["job_id"], "status": "CANCELED", **NO_ERROR})

    def _tasks(self, request: HttpRequest) -> list[m.TaskInfo]:
        """Return the tasks of the job. InvalidInput when it is no id, NotFound when a task is not known."""
        numbers = request.query.get("job_id", "").split("-")
        if not all(each.isascii() and each.isdigit() and len(each) < 21 for each in numbers):
            raise InvalidInput("Missing or invalid job_id")
        tasks = [self._ask(m.QueryTask(int(each))) for each in numbers]
        if None in tasks:
            raise NotFound("there is no such job, or it ended long ago")
        return tasks
