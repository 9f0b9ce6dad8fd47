"""The service as a whole: ready soon, small, gone when told to or when its launcher is, and good to its clients."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from e2e_service import Service, running, wait_until
from wall_time import crowding

pytestmark = pytest.mark.model

GB = 1_000_000_000


def test_an_openai_client_gets_a_sensible_answer_streamed(one_each: Service) -> None:
    client = openai.OpenAI(base_url=f"{one_each.url}/v1", api_key="unused")
    with client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=40,
        stream=True,
    ) as chunks:
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    client.close()
    assert "Paris" in "".join(pieces)
    assert len([piece for piece in pieces if piece]) >= 5, "it came in pieces"


def test_two_and_two_are_ready_within_30_s_and_take_under_6_gb(tmp_path: Path) -> None:
    crowded = crowding()
    with running(tmp_path, "--prefill", "2", "--decode", "2") as service:
        crowded = max(crowded, crowding())
        service.generate_all([[7 * i % 4000 + 500 for i in range(600 + n)] for n in range(4)], 8)
        resident, count = resident_nbytes(service), len(service.family()) + 1
        print(f"ready after {service.ready_after_s:.1f} s, {resident / GB:.2f} GB resident in {count} processes")
        assert resident < 6 * GB
        assert service.ready_after_s < 30 * crowded


def resident_nbytes(service: Service) -> int:
    """What the machine's memory holds for the service: shared pages once, memfds whole, whoever has mapped them."""
    own, memfds = 0, {}
    for process in [psutil.Process(service.process.pid), *service.family()]:
        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        own += sum(int(match[1]) * 1024 for match in re.finditer(r"^Pss_(?:Anon|File): +(\d+) kB", rollup, re.M))
        for fd in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(fd).startswith("/memfd:"):
                    memfds[fd.stat().st_ino] = fd.stat().st_blocks * 512
    return own + sum(memfds.values())


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        run_dir, family = service.run_dir, service.family()
        assert len(family) >= 6
        os.kill(service.process.pid, signal.SIGINT)
        service.process.wait(5)
        assert not [process for process in family if process.is_running()]
        assert not run_dir.exists()


def test_children_end_when_the_launcher_is_killed(tmp_path: Path) -> None:
    service = Service(tmp_path)
    service.wait_ready()
    family = service.family()
    service.process.kill()
    _, alive = psutil.wait_procs(family, timeout=10)
    service.stop()
    assert not alive


def test_a_client_that_leaves_gives_its_pages_back(one_each: Service) -> None:
    """Checked by count, on both workers, after disconnects during decode and during prefill."""
    names = ("prefill-0", "decode-0")

    def gone() -> bool:
        now = {name: one_each.stats(name) for name in names}
        return all(
            (s.num_running, s.num_waiting, s.reserved_pages) == (0, 0, 0) and s.free_pages == s.num_pages
            for s in now.values()
        )

    wait_until(gone, 10, "everything is free before")
    body = {"model": "smollm2", "max_tokens": 2000, "ignore_eos": True, "temperature": 0}
    events = one_each.stream("/v1/completions", {**body, "prompt": [9 * i % 4000 + 500 for i in range(300)]})
    for _ in range(4):
        next(events)
    assert one_each.stats("decode-0").num_running == 1
    events.close()  # mid-stream
    wait_until(gone, 10, "a request cancelled while decoding is forgotten")
    prompt = [11 * i % 4000 + 500 for i in range(4000)]
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{one_each.url}/v1/completions", json={**body, "prompt": prompt}, timeout=0.7)
    wait_until(gone, 20, "a request cancelled while prefilling is forgotten")


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
def test_a_killed_worker_costs_time_but_no_token(one_each: Service, victim: str) -> None:
    """The stream goes on with the very tokens it would have had."""
    prompt = [13 * i % 4000 + 500 for i in range(200)]
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 80, "temperature": 0.8, "seed": 7, "ignore_eos": True}
    whole = "".join(event["choices"][0]["text"] for event in one_each.stream("/v1/completions", body))
    before, events = one_each.worker_incarnation(victim), one_each.stream("/v1/completions", body)
    text = "".join(next(events)["choices"][0]["text"] for _ in range(10))
    one_each.role(victim).kill()
    text += "".join(event["choices"][0]["text"] for event in events)
    assert text == whole
    wait_until(lambda: one_each.worker_incarnation(victim) not in (None, before), 60, f"{victim} is back")


def test_bad_requests_reach_no_worker(one_each: Service) -> None:
    before = [one_each.stats(name) for name in ("prefill-0", "decode-0")]
    good = {"model": "smollm2", "messages": [{"role": "user", "content": "hi"}]}
    bad = [
        (b"{", 400),
        ({**good, "model": "gpt-9"}, 404),
        ({**good, "messages": "hi"}, 400),
        ({**good, "temperature": -1}, 400),
        ({**good, "top_p": 0}, 400),
        ({**good, "n": 0}, 400),
        ({**good, "max_tokens": "many"}, 400),
        ({**good, "messages": [{"role": "user", "content": "word " * 20_000}]}, 400),
    ]
    for body, status in bad:
        url = f"{one_each.url}/v1/chat/completions"
        reply = httpx.post(url, content=body) if isinstance(body, bytes) else httpx.post(url, json=body, timeout=30)
        assert reply.status_code == status, (body, reply.text)
        assert reply.json()["error"]["message"]
    after = [one_each.stats(name) for name in ("prefill-0", "decode-0")]
    assert [s.handoff_nbytes for s in before] == [s.handoff_nbytes for s in after]
