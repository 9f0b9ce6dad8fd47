"""What `moonpool top` shows: the status as tables of 80 columns. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from moonpool.base.units import format_nbytes
from moonpool.frontend.status_reply import SegmentRow, StatusReply, WorkerRow

SORTS = ("name", "running", "queue", "pages")
_LEVELS = " ▁▂▃▄▅▆▇█"
_NUM_LEVELS = 40
_SOURCES = (
    ("computed", "computed_tokens_s", "dark_orange3"),
    ("own pages", "own_tokens_s", "blue"),
    ("pool DRAM", "dram_tokens_s", "green"),
    ("SSD", "ssd_tokens_s", "magenta"),
    ("other machines", "remote_tokens_s", "red"),
)
_COLORS = {"ok": "green", "degraded": "yellow", "unavailable": "red"}


def overview(status: StatusReply, sort: str = "name") -> RenderableType:
    """Return the header, the figures, and the tables of workers and nodes."""
    return Group(_header(status), _figures(status), _sources(status), _workers(status, sort), _nodes(status))


def _header(status: StatusReply) -> Text:
    health = status.health
    up = _duration(status.at_s - status.started_at_s)
    line = Text.assemble(("Moonpool ", "bold"), f"{status.model}, policy {status.policy or '-'}, up {up}\n")
    return line.append(f"{health.status}: {health.sentence}", _COLORS.get(health.status, ""))


def _figures(status: StatusReply) -> Text:
    last = status.history.points[-1] if status.history.points else None
    if last is None:
        return Text("no figures yet\n")
    ttft = _times("TTFT", last.ttft_p50_s, last.ttft_p99_s, status.ttft_slo_s)
    tbt = _times("TBT", last.tbt_p50_s, last.tbt_p99_s, status.tbt_slo_s)
    rates = f"{last.requests_s:g} requests/s  {last.output_tokens_s:,.0f} output tokens/s"
    refused = sum(status.totals.refused.values())
    load = f"{status.num_running} running  {status.num_waiting} waiting  {refused} refused"
    return Text(f"{ttft}  {tbt}\n{rates}  {load}\n", overflow="fold")


def _sources(status: StatusReply) -> Text:
    """Return prompt tokens per second by where their KV came from, now, and their sum over the last points."""
    points = status.history.points
    line = Text("prompt tokens/s ")
    for name, field, color in _SOURCES:
        line.append(f"{name} ", color).append(f"{getattr(points[-1], field) if points else 0:,.0f}  ")
    sums = [sum(getattr(point, field) for _, field, _ in _SOURCES) for point in points[-_NUM_LEVELS:]]
    return line.append("\n" + levels(sums) + "\n", "cyan")


def levels(values: Sequence[float]) -> str:
    """Return one character per value, as high as the value is."""
    top = max(values, default=0.0)
    return "".join(_LEVELS[round(value / top * (len(_LEVELS) - 1)) if top > 0 else 0] for value in values)


def bar(parts: Sequence[tuple[float, str]], total: float, width: int) -> Text:
    """Return parts of a whole as a bar of `width` characters; a part is (value, color)."""
    text, used = Text(), 0
    for value, color in parts:
        length = min(width - used, round(value / total * width)) if total > 0 else 0
        text.append("█" * length, color)
        used += length
    return text.append("·" * (width - used), "bright_black")


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), expand=False)
    for name in columns:
        table.add_column(name, no_wrap=True, justify="right" if name in ("batch", "queue", "blocks") else "left")
    return table


def sort_workers(workers: Sequence[WorkerRow], sort: str) -> list[WorkerRow]:
    """Return the workers by name, or the busiest first."""
    keys = {
        "running": lambda row: -row.num_running,
        "queue": lambda row: -row.num_waiting,
        "pages": lambda row: -(row.used_pages + row.reserved_pages) / max(1, row.num_pages),
    }
    return sorted(workers, key=keys[sort]) if sort in keys else list(workers)


def _workers(status: StatusReply, sort: str) -> Table:
    table = _table("worker", "role", "", "batch", "queue", "pages used/reserved/cached", "pool read, written")
    for row in sort_workers(status.workers, sort):
        state = Text("up", "green") if row.is_up else Text("gone", "red")
        pages = [(row.used_pages, "blue"), (row.reserved_pages, "yellow"), (row.cached_pages, "green")]
        moved = f"{_rate(row.pool_read_nbytes_s)}, {_rate(row.pool_written_nbytes_s)}" if row.is_up else ""
        shown = bar(pages, row.num_pages, 20)
        table.add_row(row.name, row.role, state, str(row.num_running), str(row.num_waiting), shown, moved)
    return table


def _nodes(status: StatusReply) -> Table:
    table = _table("node", "tier", "", "blocks", "used", "")
    for node in status.nodes:
        if not node.segments:
            table.add_row(node.name, "", Text("gone", "red"), "", "", "")
        for segment in node.segments:
            state = Text(segment.status, "green" if segment.status == "ok" else "yellow")
            table.add_row(node.name, segment.tier, state, f"{segment.num_objects:,}", *_room(segment))
    return table


def _room(segment: SegmentRow) -> tuple[Text, str]:
    shown = bar([(segment.used_nbytes, "green")], segment.capacity_nbytes, 20)
    return shown, f"{format_nbytes(segment.used_nbytes)} of {format_nbytes(segment.capacity_nbytes)}"


def requests(records: Sequence[Mapping[str, Any]], chosen: int, height: int) -> RenderableType:
    """Return the newest requests, newest first, around the chosen one."""
    table = _table("", "request", "prompt", "reused", "TTFT", "predicted", "prefill > decode", "outcome")
    first = max(0, min(chosen - height // 2, len(records) - height))
    for at, record in list(enumerate(records))[first : first + height]:
        path = f"{record['prefill']} > {record['decode']}" if record["prefill"] else "-"
        times = (_seconds(record["measured_ttft_s"]), _seconds(record["predicted_ttft_s"]))
        cells = (record["request_id"][:12], f"{record['num_tokens']:,}", f"{record['cached_tokens']:,}", *times, path)
        style = "reverse" if at == chosen else ""
        table.add_row(">" if at == chosen else " ", *cells, record["outcome"], style=style)
    return table if records else Text("no requests yet")


def _times(name: str, p50_s: float | None, p99_s: float | None, target_s: float | None) -> str:
    target = f" (target {_seconds(target_s)})" if target_s is not None else ""
    return f"{name} p50 {_seconds(p50_s)} p99 {_seconds(p99_s)}{target}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.0f} ms"


def _rate(nbytes_s: float) -> str:
    return f"{format_nbytes(round(nbytes_s))}/s"


def _duration(seconds: float) -> str:
    minutes = int(seconds // 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {int(seconds % 60)} s"
