"""Requests that were changed on their way, by chance from a seed: values, nesting, characters, bytes, headers, lines.

    python -m tests.end_to_end.llm.attack --count 1000 --model smollm2 --replicas 2

Each begins as a valid request and is changed once or twice, so that some stay valid: those may be answered, all others
have to be refused (4xx), and no answer may be 5xx. Afterwards the server answers a good request as it did before.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import socket
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tests.end_to_end.llm.serving import PROGRAM, Served, serving

ANSWER_S = 60.0
HUGE = {"@huge": "9" * 400, "@longer": "-" + "7" * 5000, "@power": "1e999", "@small": "1e-999", "@zero": "-0"}
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 2**70, 0.5, -0.0, 1e300, float("nan"), float("inf"),
    float("-inf"), *HUGE, "", " ", "\0", "a" * 300, "\ud800", "x\udfff", "\U0001f999", "e\u0301\u202e", "{{ 7 * 7 }}",
    "<|im_end|>", [], [[]], {}, {"": {}}, {"\ud83d": 1}, [None], [{}], [0.5], [-1], [2**40], ["", 1], ["a"] * 40,
]  # fmt: skip
NAMES = ["", "\ud800", "tools", "logprobs", "n ", "__proto__", "a" * 3000, "é", "stream_options", "best_of", "1"]
TYPES = ["", "text/plain", "application/json;charset=utf-16", "application/jsonp", "\xff\xfe", "multipart/form-data"]
PATHS = ["/v1/completions/", "//v1/completions", "/v1/%ff%00", "/v1/models/%F0%9F", "/../etc/passwd", "*", "/\xe9",
         "/v1/completions?a=%zz", "http://[/v1/completions", "/" + "a" * 9000, "/v1/completions#x", "v1"]  # fmt: skip
HOSTS = ["[", "]:80", "", "a b", "\xff", "a:99999999", "::::", "a/../b", "h" * 5000, "[::1"]


@dataclass(frozen=True)
class Sent:
    what: str  # was changed
    raw: bytes


def valid(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """(path, body) of a request to a model called tiny, and to minilm, that is answered soon."""
    body: dict[str, Any] = {
        "model": "tiny", "max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "n": 1, "seed": 3, "stop": ["x", "yz"],
        "stream": draw.random() < 0.3, "stream_options": {"include_usage": True}, "logit_bias": {}, "user": "u",
    }  # fmt: skip
    if draw.random() < 0.1:
        return "/v1/embeddings", {"model": "minilm", "input": ["a", "b", [101, 102]], "encoding_format": "float"}
    if draw.random() < 0.5:
        parts = [{"type": "text", "text": "b"}]
        body["messages"] = [{"role": "system", "content": "a"}, {"role": "user", "content": parts}]
        return "/v1/chat/completions", body
    return "/v1/completions", {**body, "prompt": draw.choice(["abc", ["ab", "c"], [3, 4], [[3], [4, 5]]])}


def places(x: Any, found: list[tuple[Any, Any]] | None = None) -> list[tuple[Any, Any]]:
    """(container, key) of all that is in an object or a list."""
    found = [] if found is None else found
    for key in x if isinstance(x, dict) else range(len(x)) if isinstance(x, list) else ():
        found.append((x, key))
        places(x[key], found)
    return found


def change_values(draw: random.Random, body: dict[str, Any]) -> None:
    """Another value, none, or one that is wrapped, repeated or has a neighbour that nobody knows."""
    for _ in range(draw.choice([1, 1, 2])):
        within, key = draw.choice(places(body) or [(body, "model")])
        how = draw.randrange(6)
        if how <= 2:
            within[key] = draw.choice(ODD)
        elif how == 3:
            del within[key]
        elif how == 4:
            within[key] = draw.choice([[within[key]], {"a": within[key]}, [within[key]] * 20, str(within[key])])
        elif isinstance(within, dict):
            within[draw.choice(NAMES)] = draw.choice(ODD)
        else:
            within.insert(0, draw.choice(ODD))


def nested(draw: random.Random, text: bytes) -> bytes:
    depth, (begin, end) = draw.choice([10, 200, 2000, 9000]), draw.choice([(b"[", b"]"), (b'{"a":', b"}")])
    deep = begin * depth + b"1" + end * depth * draw.randrange(2)
    return draw.choice([deep, b'{"model":' + deep + b"}", b'{"prompt":' + deep + b"," + text[1:]])


def change_bytes(draw: random.Random, text: bytes) -> bytes:
    at = draw.randrange(len(text))
    odd = bytes(draw.randrange(256) for _ in range(draw.choice([1, 1, 2, 30])))
    return draw.choice([
        text[:at], text[:at] + odd + text[at:], text[:at] + odd + text[at + len(odd) :], text[at:], text * 2, odd * 500,
        b"", text[: at + 1] + text[at:], text.decode().encode("utf-16"), b"\xef\xbb\xbf" + text, text + b"\0",
    ])  # fmt: skip


def attack(draw: random.Random) -> Sent:
    path, body = valid(draw)
    what = draw.choices(["values", "bytes", "nesting", "headers", "line"], [60, 15, 5, 15, 5])[0]
    if what == "values":
        change_values(draw, body)
    text = json.dumps(body).encode()
    for name, digits in HUGE.items():
        text = text.replace(f'"{name}"'.encode(), digits.encode())
    text = {"bytes": change_bytes, "nesting": nested}.get(what, lambda draw, text: text)(draw, text)
    headers = {"host": "a", "content-type": "application/json", "content-length": str(len(text)), "connection": "close"}
    line = f"POST {path} HTTP/1.1"
    if what == "headers":
        change_headers(draw, headers, text)
    if what == "line":
        method = draw.choice(["GET", "PUT", "P\xd6ST", "", "POST" * 99, "HEAD", "OPTIONS", "CONNECT"])
        line = draw.choice([
            f"{method} {path} HTTP/1.1", f"POST {draw.choice(PATHS)} HTTP/1.1", f"POST {path} HTTP/9.9", f"POST {path}",
            f"POST {path} HTTP/1.1\r\nPOST {path} HTTP/1.1", "\x16\x03\x01" + "\0" * 99,
        ])  # fmt: skip
    head = "\r\n".join([line, *(f"{k}: {v}" for k, v in headers.items())])
    return Sent(what, head.encode("latin-1", "replace") + b"\r\n\r\n" + text)


def change_headers(draw: random.Random, headers: dict[str, str], text: bytes) -> None:
    size, one = len(text), draw.choice
    changes: list[Callable[[], Any]] = [
        lambda: headers.update({"content-length": one(["-1", "x", "9" * 30, "9" * 5000, f"{size}, {size + 1}", "", "0",
                                                       str(size - 1), str(2**63), "+5", "\xb2", "1e3"])}),
        lambda: headers.update({"content-length": str(size + one([1, 10_000_000]))}),  # more than ever comes
        lambda: headers.update({"content-type": one(TYPES)}),
        lambda: headers.pop("content-type"),
        lambda: headers.pop("content-length"),
        lambda: headers.update({"host": one(HOSTS)}),
        lambda: headers.pop("host"),
        lambda: headers.update({f"x-{i}": "a" * one([10, 400]) for i in range(one([50, 400]))}),
        lambda: headers.update({one(["a b", "\xff", "", "x" * 70000, "a\0"]): "1"}),
        lambda: headers.update({"x": one(["a\nb: c", "\0", "a\r\n b", "\xff" * 100])}),
        lambda: (headers.pop("content-length"), headers.update({"transfer-encoding": one(["chunked", "gzip", "x"])})),
        lambda: headers.update({"transfer-encoding": "chunked"}),
        lambda: headers.update({"expect": "100-continue", "upgrade": "websocket", "connection": "upgrade"}),
        lambda: headers.update({"content-encoding": "gzip", "accept": "\xff", "origin": "http://elsewhere"}),
    ]  # fmt: skip
    one(changes)()


def status(found: bytes) -> int:
    """Of an answer's head that is complete, the one after 100 (continue); 0 without one."""
    heads = re.findall(rb"^HTTP/1.1 (\d+) .*?\r\n\r\n", found, re.MULTILINE | re.DOTALL)
    return next((int(s) for s in heads if s != b"100"), 0)


def answer(port: int, sent: Sent) -> int:
    """The status; 0 where the connection was closed without one."""
    with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S) as s:
        try:
            s.sendall(sent.raw)
        except (BrokenPipeError, ConnectionResetError):
            pass  # (it may be refused before it is read)
        found = b""
        try:
            while part := s.recv(1 << 16):
                found += part
                if status(found) and b"connection: close" not in found.lower():
                    s.shutdown(socket.SHUT_WR)  # (it asked for no end of the connection)
        except TimeoutError:
            raise
        except OSError:  # it has closed the connection, too
            pass
    return status(found)


def attacks(served: Served, count: int, seed: int, at_once: int) -> tuple[Counter[Any], list[str]]:
    """(how often each kind of change had each status, what was answered as it must not be)."""
    sent = [attack(random.Random(seed + i)) for i in range(count)]
    with ThreadPoolExecutor(at_once) as pool:
        found = list(pool.map(lambda x: answer(served.port, x), sent))
    bad = [f"{s}: {x.what}: {x.raw[:600]!r}" for s, x in zip(found, sent) if not (400 <= s < 500 or s == 200)]
    return Counter((x.what, s) for s, x in zip(found, sent)), bad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--replicas", type=int, default=1, help="each on a node of its own")
    args = parser.parse_args()
    options = ["--model", args.model, "--name", "tiny", "--embed-model", "minilm", "--port", "0", "--slots", "8",
               "--max-model-len", "256", "--body-time", "1", "--time", "20"]  # fmt: skip
    command = [sys.executable, "-u", *PROGRAM, *options]
    if args.replicas > 1:
        launcher = [sys.executable, "-P", "-u", "-m", "manygrad.launcher.cli", "--nodes", str(args.replicas)]
        command = [*launcher, *PROGRAM, "--", *options, "--replicas", str(args.replicas)]
    with serving(*command) as served:
        given: dict[str, Any] = {"model": "tiny", "prompt": "Once upon", "max_tokens": 16, "temperature": 0}
        before = served.client.completions.create(**given).choices[0].text
        counts, bad = attacks(served, args.count, args.seed, 8)
        for (what, code), n in sorted(counts.items()):
            print(f"{what:10}{code or 'closed':>8}{n:7}")
        print("\n".join(bad))
        assert served.process.poll() is None, served.out
        assert not bad and served.client.completions.create(**given).choices[0].text == before


if __name__ == "__main__":
    main()
