"""A server of several models, each with a backend of its own. One is all that `twostep serve` sets up today."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.fake_backend import FakeBackend
from support.http_server import NAME, Host, Served
from support.messages import FAKE_CAPABILITIES, snapshot

from twostep.engine.backend import Worker
from twostep.errors import EngineDiedError
from twostep.server.observe.prometheus_metrics import exposition, of_workers
from twostep.server.state import ServedModel

SHORT: dict[str, Any] = {"prompt": "One, two,", "max_tokens": 2}


class Other(FakeBackend):  # type: ignore[misc, no-untyped-call]
    """Ready from the start: no task runs it."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.phase, self.capabilities = "ready", FAKE_CAPABILITIES


@pytest.fixture
def other(fake_host: Host) -> Other:
    return Other(fake_host.model.tokenizer)


@pytest.fixture
def front(fake_host: Host, other: Other) -> Iterator[Served]:
    with fake_host.front(others=[ServedModel(("second",), fake_host.model, other)]) as made:
        yield made


def complete(front: Served, **body: Any) -> httpx.Response:
    return httpx.post(f"{front.url}/v1/completions", json={**SHORT, **body}, timeout=30)


def metric(front: Served, name: str, model: str) -> float:
    text = httpx.get(f"{front.url}/metrics").text
    [value] = re.findall(rf'^twostep:{name}{{model_name="{model}"}} (\S+)$', text, re.MULTILINE)
    return float(value)


def test_all_are_listed(front: Served) -> None:
    listed = httpx.get(f"{front.url}/v1/models").json()["data"]
    assert [one["id"] for one in listed] == [NAME, "alias/of-it", "second"]
    assert httpx.get(f"{front.url}/v1/models/second").json()["id"] == "second"


def test_requests_go_to_the_model_that_they_name(front: Served, fake_host: Host, other: Other) -> None:
    """To the first if they name none."""
    first_steps = fake_host.backend.workers()[0].snapshot.steps  # type: ignore[union-attr]
    assert complete(front, model="second").json()["model"] == "second"
    assert other.workers()[0].snapshot.steps == 2
    assert fake_host.backend.workers()[0].snapshot.steps == first_steps  # type: ignore[union-attr]
    assert complete(front).json()["model"] == NAME
    assert other.workers()[0].snapshot.steps == 2
    assert metric(front, "prompt_tokens_total", "second") == metric(front, "prompt_tokens_total", NAME) > 0


def test_an_unknown_model_is_told_all_names(front: Served) -> None:
    reply = complete(front, model="third")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
    assert all(repr(name) in reply.json()["error"]["message"] for name in (NAME, "second"))


def test_a_model_that_failed_takes_no_other_with_it(front: Served, other: Other) -> None:
    """The process as a whole is not well, which its watcher is told."""
    other.phase, other.error = "failed", EngineDiedError("it broke")
    refused = complete(front, model="second")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_died")
    assert complete(front).status_code == 200
    assert httpx.get(f"{front.url}/health").json()["error"]["message"] == "it broke"
    assert httpx.get(f"{front.url}/ready").status_code == 503
    assert (metric(front, "engine_up", NAME), metric(front, "engine_up", "second")) == (1, 0)


def test_metrics_sum_over_the_workers_of_a_backend() -> None:
    """One that is down runs nothing, but what it has done counts."""
    workers = [
        Worker("a", True, 1, snapshot=snapshot(10)),
        Worker("b", False, 2, snapshot=snapshot(5)),
        Worker("c", False),
    ]
    text = exposition([("m", of_workers(workers))])
    values = dict(re.findall(r'^twostep:(\w+){model_name="m"} (\S+)$', text, re.MULTILINE))
    assert (values["engine_up"], values["engine_restarts_total"]) == ("0", "3")
    assert (values["num_requests_running"], values["steps_total"]) == ("2", "15")
    assert (values["kv_blocks"], values["kv_blocks_used"]) == ("128", "14")
    assert values["num_preemptions_total"] == "2"
