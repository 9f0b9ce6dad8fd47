"""`moonpool serve --random-weights` with a folder that has no weights: prompts of token ids, answers, and reuse. Its
settings come from a file, from the environment, and from the command line."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from e2e_service import Service, running
from random_model import small_model, token_prompt
from waiting import HANG_S

FILE = """
[serve]
model = "{model}"
random_weights = true
port = 1                  # the command line says 0: any free port
dram = "77TB"             # the environment says less
kv = "64MB"
[worker]
report_interval_s = 0.06
[conductor]
policy_tie_slack = 0.06
"""


def options_of(service: Service, role: str) -> dict[str, str]:
    """Each word of the role's command line with the one after it: options with their values."""
    return dict(pairwise(service.role(role).cmdline()))


def test_a_folder_without_weights_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "moonpool.toml"
    file.write_text(FILE.format(model=small_model(tmp_path / "small")))
    monkeypatch.setenv("MOONPOOL_DRAM", "64MB")
    monkeypatch.setenv("MOONPOOL_LISTEN", "nonsense")  # the launcher sets it for each role
    with running(tmp_path, "-c", str(file)) as service:
        assert options_of(service, "node")["--dram"] == "64000000"
        worker = options_of(service, "prefill-0")
        assert (worker["--kv"], worker["--report-interval-s"]) == ("64000000", "0.06")
        assert options_of(service, "conductor")["--policy-tie-slack"] == "0.06"
        body = {"model": "small", "prompt": token_prompt(300), "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        events = list(service.stream("/v1/completions", body))
        text = "".join(event["choices"][0]["text"] for event in events if event["choices"])
        assert text
        assert len([event for event in events if event["choices"]]) > 1, "tokens are streamed one by one"
        again = httpx.post(f"{service.url}/v1/completions", json=body, timeout=HANG_S).json()
        assert again["choices"][0]["text"] == text
        assert again["usage"]["prompt_tokens"] == 300
        first, second = (service.generate(token_prompt(200, seed=2)) for _ in range(2))
        assert first.tokens == second.tokens
        assert second.prefill is not None
        assert second.prefill.local_tokens + second.prefill.pool_tokens == 192
