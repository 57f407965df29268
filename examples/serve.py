"""Sessions over HTTP: each has a memory of constant size, however long it gets.

    pip install -e '.[serve]' && python examples/serve.py shakespeare --port 8000

    POST   /sessions                                                   201 {"session": "1f0c..."}
    POST   /sessions/ID             {"text": "ROMEO:\\n", "tokens": 40}  200 {"text": "...", "read": 47}
    POST   /sessions/ID/branch                                         201 {"session": "9ab2..."}
    DELETE /sessions/ID                                                204

Requests that wait for as many tokens are answered together. It listens on this machine only, and knows
nothing of users: put it behind what does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import memspan

MOST_SESSIONS = 10_000
MOST_TOGETHER = 64
MOST_TOKENS = 1_000
MOST_BYTES = 1 << 20


@dataclass
class Job:
    """A request that waits."""

    text: str
    tokens: int
    memory: memspan.Memory
    written: str = ""
    error: str = ""
    done: asyncio.Event = field(default_factory=asyncio.Event)


def application(run: memspan.Run, sampling: memspan.Sampling) -> Starlette:
    """The web application around a run."""
    sessions: dict[str, memspan.Memory | None] = {}
    jobs: asyncio.Queue[Job] = asyncio.Queue()

    def add(memory: memspan.Memory) -> Response:
        if len(sessions) >= MOST_SESSIONS:
            raise HTTPException(503, f"there are {MOST_SESSIONS:,} sessions: forget one first")
        sessions[name := secrets.token_hex(16)] = memory
        return JSONResponse({"session": name}, 201)

    def found(request: Request) -> tuple[str, memspan.Memory]:
        name = request.path_params["session"]
        if name not in sessions:
            raise HTTPException(404, "there is no such session")
        if (memory := sessions[name]) is None:
            raise HTTPException(409, "this session is being read or written: wait for its answer")
        return name, memory

    async def create(_: Request) -> Response:
        return add(run.model.initial_memory(1))

    async def branch(request: Request) -> Response:
        # A memory is a value: both go on from it, and neither changes it.
        return add(found(request)[1])

    async def forget(request: Request) -> Response:
        del sessions[found(request)[0]]
        return Response(status_code=204)

    async def go_on(request: Request) -> Response:
        text, tokens = await wanted(request)
        refuse_unreadable(run, text)
        name, memory = found(request)
        jobs.put_nowait(job := Job(text, tokens, memory))
        sessions[name] = None
        try:
            await job.done.wait()
        finally:
            sessions[name] = job.memory
        if job.error:
            raise HTTPException(500, job.error)
        return JSONResponse({"text": job.written, "read": int(job.memory.tokens_seen)})

    def write(together: list[Job]) -> None:
        texts = [job.text for job in together]
        memory = [job.memory for job in together]
        n = together[0].tokens
        joined = memspan.concatenate(memory)
        result = memspan.generate(run, texts, memory=joined, tokens=n, sampling=sampling)
        for row, job in enumerate(together):
            # A copy: memory[row] would be a view, which keeps all rows.
            job.written = result.texts[row]
            job.memory = result.memory.select([row])

    def write_or_say(together: list[Job]) -> None:
        try:
            write(together)
        except Exception as error:
            if len(together) == 1:
                together[0].error = str(error)
            # One is at fault: the others get their answers.
            for job in together if len(together) > 1 else []:
                write_or_say([job])

    async def work() -> None:
        while True:
            waiting = [await jobs.get()]
            while not jobs.empty() and len(waiting) < MOST_TOGETHER:
                waiting.append(jobs.get_nowait())
            for tokens in {job.tokens for job in waiting}:
                together = [job for job in waiting if job.tokens == tokens]
                await asyncio.to_thread(write_or_say, together)
                for job in together:
                    job.done.set()

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        worker = asyncio.create_task(work())
        yield
        worker.cancel()

    one = "/sessions/{session}"
    ways = [(create, "/sessions"), (go_on, one), (branch, f"{one}/branch")]
    routes = [Route(path, way, methods=["POST"]) for way, path in ways]
    return Starlette(routes=[*routes, Route(one, forget, methods=["DELETE"])], lifespan=lifespan)


def refuse_unreadable(run: memspan.Run, text: str) -> None:
    """Refuse a text without tokens, such as a space where tokens are words, or with unknown ones."""
    try:
        has_tokens = any(map(len, run.tokenizer.encode_stream([text.encode()])))
    except memspan.MemspanError as error:
        raise HTTPException(400, str(error)) from None
    if not has_tokens:
        raise HTTPException(400, "there is no token in this text: send more of it")


async def wanted(request: Request) -> tuple[str, int]:
    """The text and the number of tokens that a request asks for."""
    body = b""
    async for chunk in request.stream():
        if len(body := body + chunk) > MOST_BYTES:
            raise HTTPException(
                413, f"at most {MOST_BYTES:,} bytes: send the text in several parts"
            )
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        given: Any = json.loads(body)
        text = given["text"]
        tokens = given.get("tokens", 100)
        if text.encode() and type(tokens) is int and 0 <= tokens <= MOST_TOKENS:
            return text, tokens
    raise HTTPException(
        400, f'send {{"text": "...", "tokens": 100}}, at most {MOST_TOKENS:,} tokens'
    )


if __name__ == "__main__":
    import uvicorn

    parser = argparse.ArgumentParser(description="Sessions with a run over HTTP, on 127.0.0.1.")
    parser.add_argument("run", help="a run's folder, or the name of one that comes with memspan")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    uvicorn.run(application(memspan.load(given.run), memspan.Sampling()), port=given.port)
