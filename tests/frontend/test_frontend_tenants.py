from __future__ import annotations

import json
import logging
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moonpool.base.errors import ConfigError, Unauthorized
from moonpool.frontend.tenants import SECRET_FILE, load_cluster_secret, load_tenants

KEY = "sk-very-secret-key"


def tenants_file(folder: Path, content: object) -> Path:
    path = folder / "tenants.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_secret_survives_a_restart_and_is_private(tmp_path: Path) -> None:
    first = load_cluster_secret(tmp_path / "state")
    assert load_cluster_secret(tmp_path / "state") == first
    mode = (tmp_path / "state" / SECRET_FILE).stat().st_mode
    assert stat.S_IMODE(mode) == 0o600
    assert [path.name for path in (tmp_path / "state").iterdir()] == [SECRET_FILE]


def test_all_that_ask_at_once_get_the_same_secret(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(lambda _: load_cluster_secret(tmp_path), range(32)))
    assert len(found) == 1


@pytest.mark.parametrize("content", ["", "not hex", "abcd"])
def test_a_broken_secret_file_is_an_error_and_is_kept(tmp_path: Path, content: str) -> None:
    (tmp_path / SECRET_FILE).write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_cluster_secret(tmp_path)
    assert content not in str(caught.value) or not content
    assert (tmp_path / SECRET_FILE).read_text() == content


def test_a_state_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot keep a secret"):
        load_cluster_secret(tmp_path / "file" / "state")


def test_a_secret_that_others_can_read_is_mentioned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_cluster_secret(tmp_path)
    (tmp_path / SECRET_FILE).chmod(0o644)
    with caplog.at_level(logging.WARNING):
        secret = load_cluster_secret(tmp_path)
    assert "chmod 600" in caplog.text
    assert secret.hex() not in caplog.text


def test_without_a_file_everybody_is_the_default_tenant(tmp_path: Path) -> None:
    tenants = load_tenants(tmp_path, None)
    assert tenants.find(None) == tenants.find("Bearer anything")
    assert tenants.find(None).name == "default"
    assert load_tenants(tmp_path, None).find(None).secret == tenants.find(None).secret


def test_keys_lead_to_tenants_with_their_own_secrets(tmp_path: Path) -> None:
    path = tenants_file(
        tmp_path,
        {"tenants": [{"name": "a", "api_keys": [KEY, "k2"]}, {"name": "b", "api_keys": ["k3"], "weight": 2.5}]},
    )
    tenants = load_tenants(tmp_path, path)
    assert tenants.find(f"Bearer {KEY}") is tenants.find("bearer k2")
    a, b = tenants.find("Bearer k2"), tenants.find("Bearer k3")
    assert (a.name, b.name) == ("a", "b")
    assert a.secret != b.secret
    assert (a.weight, b.weight) == (1.0, 2.5)
    assert repr(a.secret) not in repr(a)


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", f"Basic {KEY}", KEY, "Bearer wrong", "Bearer \udc80"]
)
def test_other_keys_are_refused_without_repeating_them(tmp_path: Path, header: str | None) -> None:
    tenants = load_tenants(tmp_path, tenants_file(tmp_path, {"tenants": [{"name": "a", "api_keys": [KEY]}]}))
    with pytest.raises(Unauthorized) as caught:
        tenants.find(header)
    assert KEY not in str(caught.value)
    assert "wrong" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        [],
        {},
        {"tenants": []},
        {"tenants": [{"name": "", "api_keys": [KEY]}]},
        {"tenants": [{"name": "a", "api_keys": KEY}]},
        {"tenants": [{"name": "a", "api_keys": [""]}]},
        {"tenants": [{"name": "a", "api_keys": [KEY]}, {"name": "a", "api_keys": ["x"]}]},
        {"tenants": [{"name": "a", "api_keys": [KEY]}, {"name": "b", "api_keys": [KEY]}]},
        {"tenants": [{"name": "a", "api_key": KEY}]},
        {"tenants": [{"name": "a", "api_keys": [KEY], "weight": 0}]},
        {"tenants": [{"name": "a", "api_keys": [KEY], "weight": "high"}]},
        {"tenants": [], "surprise": 1},
    ],
)
def test_a_bad_tenants_file_is_an_error_that_names_it_and_no_key(tmp_path: Path, content: object) -> None:
    path = tenants_file(tmp_path, content)
    with pytest.raises(ConfigError) as caught:
        load_tenants(tmp_path, path)
    assert str(path) in str(caught.value)
    assert KEY not in str(caught.value)


def test_a_missing_tenants_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_tenants(tmp_path, tmp_path / "none.json")
