"""Who may use the tour: the token, the Host and the Origin decide, before anything is asked of the launcher."""

from __future__ import annotations

from pathlib import Path

import pytest
from frontend_cluster import ToyCluster
from starlette.exceptions import HTTPException

from moonpool.base.errors import ConfigError, Unauthorized
from moonpool.base.run_dirs import read_tour_token, write_tour_token
from moonpool.frontend.tour import TOKEN_HEADER, TourAccess

ACCESS = TourAccess("the-token", "gpu7.example.org")
OWN = {"host": "127.0.0.1:8000", TOKEN_HEADER: "the-token"}


def is_refused(headers: dict[str, str]) -> bool:
    try:
        ACCESS.check(headers)
    except (HTTPException, Unauthorized):
        return True
    return False


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8000", "localhost:8000", "LOCALHOST", "[::1]:8000", "10.0.0.7", "gpu7.example.org:8000"]
)
def test_the_own_page_may_use_the_tour(host: str) -> None:
    assert not is_refused({**OWN, "host": host})
    assert not is_refused({**OWN, "host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"})
    assert not is_refused({**OWN, "host": host, "origin": f"https://{host}"})
    assert is_refused({**OWN, "host": host, "origin": f"http://{host}.evil.example"}), "it is the origin that counts"


@pytest.mark.parametrize(
    "host", ["evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "", "[evil]"]
)
def test_a_name_that_somebody_else_s_dns_points_here_is_refused(host: str) -> None:
    with pytest.raises(HTTPException, match="403"):
        ACCESS.check({**OWN, "host": host, "origin": f"http://{host}"})


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "http://127.0.0.1:9000"},
        {"origin": "null"},
        {"origin": ""},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_a_page_of_another_site_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(HTTPException, match="403"):
        ACCESS.check({**OWN, **headers})


@pytest.mark.parametrize("token", [None, "", "The-token", "the-token "])
def test_without_the_token_nobody_may(token: str | None) -> None:
    headers = {"host": OWN["host"], **({} if token is None else {TOKEN_HEADER: token})}
    with pytest.raises(Unauthorized, match="token that the start"):
        ACCESS.check(headers)
    assert "the-token" not in repr(ACCESS)


def test_a_launcher_without_a_tour_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--tour"):
        read_tour_token(tmp_path)
    write_tour_token(tmp_path, "secret")
    assert read_tour_token(tmp_path) == "secret"


async def test_there_is_no_tour_unless_asked_for(tmp_path: Path) -> None:
    async with ToyCluster(tmp_path) as cluster, cluster.client() as http:
        assert (await http.get("/v1/tour")).status_code == 404
        assert (await http.post("/v1/tour/kill", json={"worker": "p0"})).status_code == 404
        assert (await http.get("/v1/status")).json()["has_tour"] is False
