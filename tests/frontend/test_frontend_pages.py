"""The files of the live page, and the blocks that it shows, as the front end serves them."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from frontend_cluster import ToyCluster

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.frontend.blocks import as_reply
from moonpool.frontend.pages import read_pages
from moonpool.master.service import Master, MasterConfig
from moonpool.store.messages import SegmentInfo, StoredBlock, Tier


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with ToyCluster(tmp_path) as cluster, cluster.client() as http:
        yield http


async def test_the_page_is_served_with_a_strict_policy(http: httpx.AsyncClient) -> None:
    reply = await http.get("/", follow_redirects=True)
    assert (reply.status_code, reply.url.path) == (200, "/ui/")
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert reply.headers["x-content-type-options"] == "nosniff"


async def test_every_file_of_the_page_is_there_and_is_not_sent_again(http: httpx.AsyncClient) -> None:
    for name in read_pages():
        reply = await http.get(f"/ui/{name}")
        assert reply.status_code == 200
        again = await http.get(f"/ui/{name}", headers={"if-none-match": reply.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    for path in ("/ui/none.js", "/ui/..%2fapp.py", "/ui/../app.py"):
        assert (await http.get(path)).status_code == 404


def test_the_page_refers_to_its_own_files_only() -> None:
    pages = {name: content.decode() for name, content in read_pages().items()}
    assert {"index.html", "app.js", "style.css"} <= pages.keys()
    for name, text in pages.items():
        named = re.findall(r"""(?:from|src=|href=)\s*["'](?:\./)?([\w./:-]+\.\w+)["']""", text)
        assert set(named) <= pages.keys(), name
        assert set(re.findall(r"https?://[\w./]+", text)) <= {"http://www.w3.org/2000/svg"}, name


def info(name: str, tier: Tier) -> SegmentInfo:
    descriptor = SegmentDescriptor(name=name, nbytes=1, incarnation=1, host="h", endpoints=())
    return SegmentInfo(descriptor, "node", tier, None)


def test_blocks_refer_to_each_other_by_position() -> None:
    blocks = [
        StoredBlock(b"\x01", b"", 10, ("node/dram", "node/ssd"), 5, 0.5, True),
        StoredBlock(b"\x02", b"\x01", 10, ("node/ssd",), 0, None, False),
        StoredBlock(b"\x03", b"\x09", 10, (), 0, 0.1, False),
    ]
    reply = as_reply(blocks, [info("node/dram", Tier.DRAM), info("node/ssd", Tier.SSD)], 7, 3)
    assert (reply.total, reply.next) == (7, 3)
    assert [(row[0], row[1], row[3]) for row in reply.blocks] == [("01", -1, [0, 1]), ("02", 0, [1]), ("03", -1, [])]
    assert [(place.node, place.tier) for place in reply.segments] == [("node", "dram"), ("node", "ssd")]


async def test_blocks_need_an_admin_key_and_a_pool(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    path.write_text(json.dumps({"tenants": [{"name": "a", "api_keys": ["key-a"]}], "admin_keys": ["key-admin"]}))
    with tempfile.TemporaryDirectory(prefix="mp") as folder:
        address = f"unix:{folder}/m.sock"
        master = Master(MasterConfig(data_dir=f"{folder}/m", listen=address))
        await master.start()
        async with ToyCluster(tmp_path / "s", tenants_file=str(path), master_address=address) as cluster:
            async with cluster.client() as http:
                for url in ("/v1/blocks", "/v1/blocks/01"):
                    assert (await http.get(url)).status_code == 401
                    assert (await http.get(url, headers={"Authorization": "Bearer key-a"})).status_code == 401
                admin = {"Authorization": "Bearer key-admin"}
                assert (await http.get("/v1/blocks", headers=admin)).json()["blocks"] == []
                found = (await http.get("/v1/blocks/0102", headers=admin)).json()
                assert found["why"].startswith("This object was never stored")
                assert (await http.get("/v1/blocks/xyz", headers=admin)).status_code == 400
                refused = await http.post("/v1/blocks/0102/verify", headers={"Authorization": "Bearer key-a"})
                assert refused.status_code == 401
        await master.close()


async def test_without_a_pool_there_are_no_blocks(http: httpx.AsyncClient) -> None:
    assert (await http.get("/v1/blocks")).status_code == 404
