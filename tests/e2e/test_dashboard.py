"""The live page in a real browser, against a live service of two prefill and two decode workers."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest
from browser import NARROW, WIDE, LivePage, running_browser
from e2e_service import Service
from playwright.sync_api import Browser, expect
from playwright.sync_api import Route as BrowserRoute
from waiting import HANG_S, wait_until

from moonpool.base.cluster import CONDUCTOR_SERVICE
from moonpool.base.rpc import BlockingClient
from moonpool.conductor.messages import PrefillParts, RequestEnded, Route
from moonpool.store.client.put_request import Put

SHOTS = Path(__file__).parents[2] / "build" / "dashboard"
DRAWN_MS = 1000
VIEWS = ("overview", "cluster", "residency", "requests", "predictions", "chat", "tour")
STORY = "Once upon a time there was a shared table of pages that nobody had to copy twice. " * 8


@pytest.fixture(scope="module")
def service(two_each: Service) -> Service:
    """After some requests, of which the second has reused what the first one computed."""
    for question in (STORY, STORY, "short"):
        body = {"model": "small", "prompt": question, "max_tokens": 4}
        reply = httpx.post(f"{two_each.url}/v1/completions", json=body, trust_env=False, timeout=HANG_S)
        assert reply.status_code == 200, reply.text
    return two_each


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, service: Service) -> Iterator[LivePage]:
    page = LivePage(browser, service.url)
    yield page
    page.check()
    page.close()


def test_slash_leads_to_the_page_and_the_banner_names_it(page: LivePage, service: Service) -> None:
    page.tab.goto(service.url)
    assert page.tab.url == f"{service.url}/ui/"
    assert f"{service.url}/ui" in service.log()
    expect(page.tab.locator("#health")).to_contain_text("4 workers are up")
    expect(page.tab.locator("header")).to_contain_text("small")


def test_overview_shows_where_prompt_tokens_came_from(page: LivePage) -> None:
    tab = page.open("overview")
    for name in ("Time to first token", "Requests / s", "Prompt tokens reused", "Refused"):
        expect(tab.locator(f"[data-tile='{name}']")).to_be_visible()
    expect(tab.locator("[data-tile='Prompt tokens reused'] .sub")).not_to_have_text("0 % since the start")
    chart = tab.locator(".picture svg")
    label = chart.get_attribute("aria-label") or ""
    assert "from own pages" in label
    assert "from pool DRAM" in label
    wait_until(lambda: tab.evaluate("document.querySelectorAll('.picture path.area').length") == 5, "five sources")


def test_the_keyboard_is_enough(page: LivePage) -> None:
    tab = page.open("overview")
    tab.locator("nav a").first.focus()
    for _ in range(3):
        tab.keyboard.press("Tab")
    tab.keyboard.press("Enter")
    expect(tab.locator("nav a[aria-current]")).to_have_text("Requests")
    tab.locator("[data-request]").first.focus()
    tab.keyboard.press("Enter")
    expect(tab.locator("#detail")).to_be_focused()
    page.open("overview")
    tab.locator(".picture svg").focus()
    tab.keyboard.press("ArrowLeft")
    expect(tab.locator(".picture .cursor")).to_have_count(1)


def test_a_request_opens_its_decision(page: LivePage) -> None:
    tab = page.open("requests")
    tab.locator("#filter").fill("no such worker")
    expect(tab.locator("[data-request]")).to_have_count(0)
    tab.locator("#filter").fill("prefill-")
    tab.locator("[data-request]").first.click()
    detail = tab.locator("#detail")
    expect(detail).to_contain_text("was chosen")
    expect(detail.locator(".cand")).not_to_have_count(0)
    expect(detail).to_contain_text("decode")
    expect(tab.locator("tr[aria-selected] .badge")).to_have_text("done")


def test_a_pull_is_shown_layer_by_layer(page: LivePage, service: Service) -> None:
    with closing(BlockingClient(service.address("conductor"), CONDUCTOR_SERVICE, name="test")) as conductor:
        conductor.call(Route(request_id="layered", keys=[], num_tokens=200, max_tokens=4))
        parts = PrefillParts(queue_s=0.1, pull_s=0.6, compute_s=0.9, handoff_s=0.1, pull_layers_s=(0.1, 0.4, 0.6))
        conductor.call(RequestEnded(request_id="layered", ttft_s=1.2, output_tokens=2, parts=parts))
    tab = page.open("requests")
    tab.locator("[data-request='layered']").click()
    shown = tab.locator("#detail [data-layers='3']")
    expect(shown).to_have_text(
        re.compile(r"first was there after 100 ms, the last after 600 ms, the slowest took 300 ms")
    )


def test_a_chat_is_answered_twice_and_the_hit_is_shown(page: LivePage) -> None:
    tab = page.open("chat")
    tab.locator("button", has_text="Use a long sample").click()
    tab.locator("button.main").click()
    first = tab.locator("[data-run='1']")
    first.wait_for()
    expect(first).to_contain_text("→")
    tab.locator("[data-again]").click()
    second = tab.locator("[data-run='2']")
    second.wait_for()
    expect(second).to_contain_text("hit:")
    assert int(second.get_attribute("data-cached") or 0) >= 64
    expect(second).to_contain_text("prefill-")


def test_a_block_is_explained_and_verified(page: LivePage) -> None:
    tab = page.open("residency")
    tab.locator("td button.link").first.click()
    tab.locator("td .tools button").first.click()
    expect(tab.locator("[data-why]")).to_contain_text("This object is stored")
    expect(tab.locator("#life")).to_contain_text("node (DRAM)")
    tab.locator("#verify").click()
    expect(tab.locator("[data-verified]")).to_contain_text("every checksum is right")


def test_a_worker_that_is_killed_is_gone_and_comes_back(page: LivePage, service: Service) -> None:
    gone_after_s(page, service)


@pytest.mark.soak
def test_a_worker_that_is_killed_is_gone_within_3_s(page: LivePage, service: Service) -> None:
    """In one of five tries; a busy machine makes the others longer."""
    delays_s = [gone_after_s(page, service) for _ in range(5)]
    print(f"gone after {[round(each, 2) for each in delays_s]} s")
    assert min(delays_s) < 3


def gone_after_s(page: LivePage, service: Service) -> float:
    """Kill a worker. Return after how long the page says so; it is up again then."""
    tab = page.open("cluster")
    badge = tab.locator("[data-worker='decode-1'] .badge").first
    expect(badge).to_have_text("up")
    service.role("decode-1").kill()
    began_s = time.monotonic()
    expect(badge).to_have_text("gone")
    delay_s = time.monotonic() - began_s
    expect(tab.locator("#health")).to_contain_text("decode-1")
    expect(badge).to_have_text("up")
    expect(tab.locator("#health")).to_contain_text("4 workers are up")
    return delay_s


@pytest.mark.parametrize("width", [WIDE, 700, NARROW])
def test_the_transfers_are_drawn_within_their_card(browser: Browser, service: Service, width: int) -> None:
    page = LivePage(browser, service.url, width=width)
    tab = page.open("cluster")
    tab.wait_for_selector(".flow rect")
    card = tab.locator(".moves").bounding_box()
    boxes = [each.bounding_box() for each in tab.locator(".flow rect").all()]
    assert card is not None
    assert len(boxes) == 5, "two prefill workers, the pool, two decode workers"
    for box in boxes:
        assert box is not None
        assert card["x"] + 10 <= box["x"]
        assert box["x"] + box["width"] <= card["x"] + card["width"] - 10, "nothing is cut off at the right edge"
    page.check()
    page.close()


def test_the_cluster_view_tells_what_hot_keys_take_and_save(page: LivePage) -> None:
    """The figures are the master's; a service with one node has none, so they are put into its answer."""
    hot = {"hot_objects": 64, "hot_bytes": 33_600_000, "hot_replicas": 70, "hot_saved_bytes": 1_250_000_000}

    def answer(route: BrowserRoute) -> None:
        reply = route.fetch()
        status = reply.json()
        status["pool"]["counters"] |= hot
        route.fulfill(response=reply, json=status)

    expect(page.open("cluster").locator(".moves .hint")).to_contain_text("look-ups found theirs")
    expect(page.tab.locator(".moves .hint")).not_to_contain_text("Hot keys")
    page.tab.route("**/v1/status*", answer)
    expect(page.tab.locator(".moves .hint")).to_contain_text(
        "Hot keys: 64 blocks with extra replicas (33.6 MB); readers took about 1.3 GB from them."
    )
    page.tab.unroute_all(behavior="wait")


@pytest.mark.parametrize("missing", ["measured_nbytes_s", "pulled_tokens_s", "computed_tokens_s", "min_tokens"])
def test_predictions_when_nothing_limits_a_pull_yet(page: LivePage, missing: str) -> None:
    """JSON has null for what is infinite, as after pulls that took equally long whatever their size."""
    found = {
        "at_tokens": 8192,
        "min_tokens": 1,
        "measured_nbytes_s": 1e9,
        "pulled_tokens_s": 2e4,
        "computed_tokens_s": 1e3,
    }

    def answer(route: BrowserRoute) -> None:
        reply = route.fetch()
        route.fulfill(response=reply, json={**reply.json(), "fetch_or_compute": {**found, missing: None}})

    page.tab.route("**/v1/status*", answer)
    tab = page.open("predictions")
    expected = "always faster" if missing == "min_tokens" else "from 1 token on are worth fetching."
    expect(tab.locator("main section").last).to_contain_text(expected)
    page.tab.unroute_all(behavior="wait")


@pytest.mark.parametrize(("width", "scheme"), [(WIDE, "light"), (NARROW, "dark")])
def test_every_view_is_accessible_and_fits(browser: Browser, service: Service, width: int, scheme: str) -> None:
    """Screenshots are for people to look at: build/dashboard."""
    page = LivePage(browser, service.url, width=width, scheme=scheme)
    SHOTS.mkdir(parents=True, exist_ok=True)
    faults: dict[str, list[str]] = {}
    for view in VIEWS:
        tab = page.open(f"tour/{token_of(service)}" if view == "tour" else view)
        shown = {"residency": "#map[data-drawn]", "tour": "[data-tour='fill'] .bar"}.get(view, "main section")
        tab.wait_for_selector(shown)
        if view == "requests":
            tab.locator("[data-request]").last.click()
            tab.wait_for_selector("#detail .lines")
        tab.screenshot(path=SHOTS / f"{view}-{width}-{scheme}.png", full_page=view != "requests")
        faults[view] = page.faults()
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{view} is wider than {width}"
        tab_box = tab.locator("nav a[aria-current]").bounding_box()
        assert tab_box is not None
        assert -1 <= tab_box["x"] <= width + 1 - tab_box["width"], f"the tab {view} is out of sight"
    assert faults == {view: [] for view in VIEWS}
    page.check()
    page.close()


def token_of(service: Service) -> str:
    found = re.search(r"/ui#tour/(\S+)", service.log())
    assert found is not None, service.log()
    return found[1]


@pytest.fixture
def tour(browser: Browser, service: Service) -> Iterator[LivePage]:
    """At the address that the start of the service printed."""
    page = LivePage(browser, service.url)
    page.tab.goto(f"{service.url}/ui#tour/{token_of(service)}")
    page.tab.wait_for_selector("[data-tour='kill']")
    assert page.tab.url == f"{service.url}/ui/#tour", "the token has left the address bar"
    yield page
    page.check()
    page.close()


def test_the_tour_shows_a_hit(tour: LivePage) -> None:
    part = tour.tab.locator("[data-tour='prefix']")
    part.locator("button").click()
    expect(part).to_contain_text(re.compile(r"first prompt: 0 of [\d,]+ tokens were cached"))
    expect(part).to_contain_text(re.compile(r"second prompt: [1-9][\d,]* of [\d,]+ tokens were cached"))


def test_the_tour_kills_a_worker_and_shows_it_back(tour: LivePage, service: Service) -> None:
    before = service.role("prefill-1").pid
    part = tour.tab.locator("[data-tour='kill']")
    part.locator("select").select_option("prefill-1")
    part.locator("button").click()
    expect(part).to_contain_text("prefill-1 is gone after")
    expect(part).to_contain_text("a request sent meanwhile was answered by prefill-0")
    expect(part).to_contain_text("prefill-1 is back after")
    assert service.role("prefill-1").pid != before


def test_the_tour_fills_the_pool(tour: LivePage, service: Service) -> None:
    part = tour.tab.locator("[data-tour='fill']")
    part.locator("button").click()
    expect(part).to_contain_text(re.compile(r"[1-9]\S* objects were evicted"))
    expect(part).to_contain_text("were removed again")
    with service.store() as store:
        assert store.remove_matching(None, prefix=b"moonpool-tour/", force=True) == (0, 0)


def test_the_tour_asks_for_its_token(browser: Browser, service: Service) -> None:
    page = LivePage(browser, service.url)
    tab = page.open("tour")
    expect(tab.locator("main")).to_contain_text("The tour needs its token")
    tab.locator("#token").fill(token_of(service))
    tab.locator("button.main").click()
    tab.wait_for_selector("[data-tour='kill']")
    page.check()
    page.close()


@pytest.mark.parametrize(
    ("headers", "body", "status", "complaint"),
    [
        ({"x-moonpool-tour": "guessed"}, {"worker": "decode-0"}, 401, "needs the token"),
        ({"host": "evil.example"}, {"worker": "decode-0"}, 403, "not at 'evil.example'"),
        ({"origin": "http://evil.example"}, {"worker": "decode-0"}, 403, "evil.example may not"),
        ({"sec-fetch-site": "cross-site"}, {"worker": "decode-0"}, 403, "another site"),
        ({}, {"worker": "master"}, 400, "no worker of this service; its workers: prefill-0"),
        ({}, {"worker": "1"}, 400, "no worker of this service"),
        ({}, {}, 400, "worker"),
    ],
)
def test_others_cannot_kill(
    service: Service, headers: dict[str, str], body: dict[str, str], status: int, complaint: str
) -> None:
    before = {name: service.role(name).pid for name in ("decode-0", "master")}
    sent = {"x-moonpool-tour": token_of(service), **headers}
    reply = httpx.post(f"{service.url}/v1/tour/kill", json=body, headers=sent, trust_env=False, timeout=HANG_S)
    assert (reply.status_code, complaint in reply.json()["error"]["message"]) == (status, True), reply.text
    assert {name: service.role(name).pid for name in before} == before


@contextmanager
def many_blocks(service: Service, number: int) -> Iterator[None]:
    """Small objects in chains of 50, each the continuation of the one before."""
    with service.store() as store:
        keys = [b"page-%05d" % at for at in range(number)]
        for first in range(0, number, 500):
            puts = [
                Put(key=keys[at], buffers=[b"x" * 64], parent=keys[at - 1] if at % 50 else b"")
                for at in range(first, min(number, first + 500))
            ]
            assert store.put_objects(puts) == [None] * len(puts)
        try:
            yield
        finally:
            store.remove_matching("^page-", force=True)


def add_records(service: Service, number: int) -> None:
    with closing(BlockingClient(service.address("conductor"), CONDUCTOR_SERVICE, name="test")) as conductor:
        for at in range(number):
            request_id = f"page{at:06d}"
            conductor.call(Route(request_id=request_id, keys=[], num_tokens=20 + at % 200, max_tokens=4))
            conductor.call(RequestEnded(request_id=request_id, outcome="cancelled", ttft_s=0.1, output_tokens=2))


def heap_nbytes(page: LivePage) -> int:
    session = page.tab.context.new_cdp_session(page.tab)
    session.send("HeapProfiler.collectGarbage")
    found = session.send("Runtime.getHeapUsage")
    session.detach()
    return int(found["usedSize"])


def test_many_blocks_and_records_are_drawn(page: LivePage, service: Service) -> None:
    add_records(service, 1_000)
    with many_blocks(service, 12_000):
        show_blocks(page)
    show_records(page)


def show_blocks(page: LivePage) -> None:
    tab = page.open("residency")
    tab.wait_for_selector("#map[data-drawn='10000']")
    tab.locator("#forward").click()
    expect(tab.locator("[data-range]")).to_contain_text(re.compile(r"Blocks 10,001 to 12,\d\d\d of 12,\d\d\d"))
    assert int(tab.locator("#map").get_attribute("data-drawn") or 0) >= 2_000
    tab.locator("#back").click()
    tab.wait_for_selector("#map[data-drawn='10000']")


def show_records(page: LivePage) -> None:
    page.open("requests").wait_for_selector("[data-drawn='1000']")


@pytest.mark.soak
def test_many_blocks_and_records_are_drawn_in_time_and_memory(page: LivePage, service: Service) -> None:
    """The shortest of twenty times; a busy machine makes the others longer."""
    add_records(service, 1_000)
    with many_blocks(service, 12_000):
        show_blocks(page)
        blocks_ms = drawn_ms(page, "draw blocks")
    show_records(page)
    records_ms, nbytes = drawn_ms(page, "draw requests"), heap_nbytes(page)
    print(f"10,000 blocks in {blocks_ms:.0f} ms, 1,000 records in {records_ms:.0f} ms, {nbytes / 1e6:.0f} MB of heap")
    assert max(blocks_ms, records_ms) < DRAWN_MS
    assert nbytes < 100e6


def drawn_ms(page: LivePage, name: str) -> float:
    """Return the shortest of twenty times. A change of the window's width draws everything again."""
    page.tab.evaluate("performance.clearMeasures()")

    def times() -> list[float]:
        found: list[float] = page.tab.evaluate(f"performance.getEntriesByName('{name}').map((each) => each.duration)")
        return found

    for number in range(20):
        page.tab.set_viewport_size({"width": WIDE - 20 * (1 - number % 2), "height": 900})  # it is WIDE at first
        wait_until(lambda number=number: len(times()) > number, "it is drawn again")  # type: ignore[misc]
    return min(times())
