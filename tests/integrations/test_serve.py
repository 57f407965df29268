"""examples/serve.py, by a server of its own."""

from __future__ import annotations

import inspect
import json
import runpy
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.testclient import TestClient

import memspan
from memspan.lab.runs.options import RunConfig
from memspan.models.fast_weights.config import FastWeightsConfig

EXAMPLE = Path(__file__).parents[2] / "examples" / "serve.py"
GREEDY = memspan.Sampling(temperature=0)


@pytest.fixture(scope="module")
def run() -> memspan.Run:
    return memspan.load("shakespeare-fast-weights")


@pytest.fixture(scope="module")
def port(run: memspan.Run) -> Iterator[int]:
    application = runpy.run_path(str(EXAMPLE))["application"](run, GREEDY)
    server = uvicorn.Server(uvicorn.Config(application, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join()


def ask(port: int, method: str, path: str, body: object = None) -> tuple[int, Any]:
    raw = body if isinstance(body, str) else json.dumps(body)
    with closing(HTTPConnection("127.0.0.1", port)) as connection:
        connection.request(method, path, raw)
        response = connection.getresponse()
        content = response.read().decode()
    return response.status, json.loads(content) if content.startswith("{") else content


@pytest.mark.smoke
def test_sessions_go_on_branch_and_are_forgotten(port: int, run: memspan.Run) -> None:
    status, made = ask(port, "POST", "/sessions")
    assert status == 201
    path = f"/sessions/{made['session']}"
    status, first = ask(port, "POST", path, {"text": "ROMEO:\n", "tokens": 5})
    expected = memspan.generate(run, "ROMEO:\n", tokens=5, sampling=GREEDY)
    assert (status, first) == (200, {"text": expected.text, "read": 12})
    _, other = ask(port, "POST", f"{path}/branch")
    for name, text in ((made["session"], "one"), (other["session"], "another way")):
        _, found = ask(port, "POST", f"/sessions/{name}", {"text": text, "tokens": 4})
        alone = memspan.generate(run, text, memory=expected.memory, tokens=4, sampling=GREEDY)
        assert found["text"] == alone.text
    assert ask(port, "DELETE", path) == (204, "")
    assert ask(port, "DELETE", path) == (404, "there is no such session")


def test_waiting_requests_are_answered_together(port: int, run: memspan.Run) -> None:
    wanted = [{"text": f"line {n} " * (n + 1), "tokens": 3 + n % 2} for n in range(12)]

    def answer(body: dict[str, Any]) -> Any:
        _, made = ask(port, "POST", "/sessions")
        return ask(port, "POST", f"/sessions/{made['session']}", body)[1]

    with ThreadPoolExecutor(12) as threads:
        answers = threads.map(answer, wanted)
    for found, (text, n) in zip(answers, map(dict.values, wanted), strict=True):
        alone = memspan.generate(run, text, tokens=n, sampling=GREEDY)
        assert found == {"text": alone.text, "read": len(text) + n}


def test_one_request_at_fault_fails_alone(
    run: memspan.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others of its batch are answered, and each keeps no more than its own row."""
    serve = runpy.run_path(str(EXAMPLE))
    application = serve["application"](run, GREEDY)
    started = threading.Event()
    generate = memspan.generate
    batches = []

    def slow(run: memspan.Run, texts: list[str], **given: Any) -> memspan.Generation:
        batches.append(len(texts))
        started.wait(60)
        if "NaN" in texts:
            raise memspan.NonFiniteError("the logits are not finite")
        return generate(run, texts, **given)

    monkeypatch.setattr(memspan, "generate", slow)
    with TestClient(application) as client, ThreadPoolExecutor(5) as threads:

        def ask_once(text: str) -> Any:
            path = f"/sessions/{client.post('/sessions').json()['session']}"
            answer = client.post(path, json={"text": text, "tokens": 2})
            return answer.status_code

        answers = [threads.submit(ask_once, text) for text in ("first", "a", "NaN", "b", "c")]
        time.sleep(1)
        started.set()
        statuses = [answer.result() for answer in answers]
    assert statuses == [200, 200, 500, 200, 200]
    assert max(batches) > 1
    sessions = inspect.getclosurevars(application.routes[-1].endpoint).nonlocals["sessions"]
    for memory in sessions.values():
        for tensor in memory.tensors().values():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_a_text_without_tokens_is_refused(tmp_path: Path) -> None:
    """A space, where tokens are words."""
    (tmp_path / "text").write_text("a word and another\n" * 200)
    config = RunConfig(
        FastWeightsConfig(n_layers=1, d_model=8, n_heads=1, d_ff=8),
        "fast-weights",
        data=memspan.DataConfig(corpus=str(tmp_path / "text"), tokenizer="words"),
        train=memspan.TrainConfig(steps=1, batch_size=1, segment_length=8, sample_tokens=0),
    )
    run = memspan.load(memspan.train(config, tmp_path / "run"))
    serve = runpy.run_path(str(EXAMPLE))
    with TestClient(serve["application"](run, GREEDY)) as client:
        path = f"/sessions/{client.post('/sessions').json()['session']}"
        assert client.post(path, json={"text": " ", "tokens": 2}).status_code == 400
        assert client.post(path, json={"text": "a word", "tokens": 2}).status_code == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("{", 400),
        ({"text": ""}, 400),
        ({"text": "\ud800"}, 400),
        ({"text": "a", "tokens": 1e9}, 400),
        ({"text": "a" * (1 << 20)}, 413),
    ],
)
def test_bounds(port: int, body: object, status: int) -> None:
    _, made = ask(port, "POST", "/sessions")
    found = ask(port, "POST", f"/sessions/{made['session']}", body)
    assert found[0] == status
    assert "\n" not in found[1]
    assert ask(port, "POST", "/sessions/none", {"text": "a"})[0] == 404
