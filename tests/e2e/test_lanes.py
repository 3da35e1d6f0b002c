"""The servers are what the other tests take them for."""

import re

import pytest
from served.server import ACTIVE_LIMIT, RESIDENT_LIMIT, Server

SCHEDULERS = {
    "sync": ("PacedScheduler", 1),
    "async": ("PacedAsyncScheduler", 2),
}


@pytest.fixture(params=["roomy", "small"])
def server(servers: dict[str, Server], request: pytest.FixtureRequest) -> Server:
    """Each server in turn."""
    return servers[request.param]


def test_scheduler_and_steps_in_flight(server: Server) -> None:
    """The async lane schedules asynchronously and has two steps in flight, the sync lane one."""
    status, body = server.post(
        "/v1/completions",
        {
            "model": "m",
            "prompt": "Hi",
            "max_tokens": 20,
            "ignore_eos": True,
            "vllm_xargs": {"output_rate_user": "free"},
        },
    )
    assert status == 200, body
    name, depth = SCHEDULERS[server.lane]
    engine = server.record.engine()
    assert engine["scheduler"] == name
    assert ("AsyncScheduler" in engine["bases"]) == (server.lane == "async")
    assert engine["max_concurrent_batches"] == depth
    assert max(step["in_flight"] for step in server.record.since().steps) == depth


def test_version_under_test_is_served(server: Server, vllm_version: str) -> None:
    """The server runs the version of vLLM that this test process imports."""
    assert vllm_version in server.get("/version")


def test_log_has_one_line_with_the_limits(server: Server) -> None:
    """The effective limits are in the log exactly once, residents and active requests with them."""
    log = server.log.read_text(errors="replace")
    lines = re.findall(r".*vllm-pacer limits output tokens per user: (.*)", log)
    assert len(lines) == 1
    assert f"{RESIDENT_LIMIT} resident requests, {ACTIVE_LIMIT} active" in lines[0]


def test_log_line_names_the_limits_of_few_users(small: Server) -> None:
    """With few users, from a YAML file, the line names each with its limit."""
    (line,) = re.findall(r"vllm-pacer limits .*", small.log.read_text(errors="replace"))
    assert "default no limit, burst 0.1 s" in line
    assert "free: no limit, a: 60 tokens/s, b: 90 tokens/s, c: 150 tokens/s" in line
    assert "fairness off" in line


def test_log_line_counts_many_users(roomy: Server) -> None:
    """With many users, from flags, the line says how many."""
    (line,) = re.findall(r"vllm-pacer limits .*", roomy.log.read_text(errors="replace"))
    assert "default 0.01 tokens/s" in line
    assert "15 users named, 14 of them limited" in line


def test_log_warns_about_anonymous_requests(roomy: Server, small: Server) -> None:
    """Where unnamed requests share one quota the log warns of it; without a default it does not."""
    assert "__anonymous__" in roomy.log.read_text(errors="replace")
    assert "share one quota" in roomy.log.read_text(errors="replace")
    assert "share one quota" not in small.log.read_text(errors="replace")
