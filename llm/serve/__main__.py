"""A server that speaks OpenAI's API, for many clients at once.

    python -m manygrad.llm.serve --model smollm2 --slots 16
    launcher --nodes 2 -m manygrad.llm.serve -- --model smollm2 --embed-model minilm
    launcher --nodes 4 -m manygrad.llm.serve -- --model smollm2 --replicas 2

Rank 0 listens; all ranks compute every text together, or groups of them, each with a replica of the model, every group
its own texts (`--replicas`). Ctrl-C finishes what has been asked for (`--drain`), a second one does not wait.
"""

from __future__ import annotations

import argparse
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from manygrad import Tensor, nn, world
from manygrad.llm.embedder import Embedder
from manygrad.llm.encoder import load_encoder
from manygrad.llm.engine.batch import Batch
from manygrad.llm.engine.steps import Steps
from manygrad.llm.engine.writer import BLOCKS
from manygrad.llm.load import dtype_for, load
from manygrad.llm.options import add_type_options
from manygrad.llm.sharding import rules
from manygrad.tensor.threads import Threads

try:
    import uvicorn

    from manygrad.llm.serve.connection import Connection
    from manygrad.llm.serve.loop import report, run
    from manygrad.llm.serve.ranks import Ranks
    from manygrad.llm.serve.routes import Limits, Service
    from manygrad.llm.serve.scheduler import Scheduler
except ImportError as error:
    raise SystemExit(f'manygrad.llm.serve: {error}; it comes with pip install ".[serve]"') from None

START_S = 30.0  # that the web server has


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="manygrad.llm.serve", description="A server that speaks OpenAI's API.")
    parser.add_argument("--model", default="smollm2", help="a .gguf file, a folder with config.json, or smollm2")
    parser.add_argument("--name", help="of the model, for clients; without one: --model")
    parser.add_argument("--embed-model", help="also make vectors, with this encoder: a folder, or minilm")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen at; 0.0.0.0: whoever reaches this machine"
    )
    parser.add_argument("--port", type=int, default=8000, help="0: chosen by the system")
    parser.add_argument(
        "--replicas", type=int, default=1,
        help="groups of nodes, each with a whole model that writes texts of its own; 1: all nodes together have one",
    )  # fmt: skip
    parser.add_argument("--slots", type=int, default=16, help="texts at once, of each replica")
    parser.add_argument(
        "--max-model-len", type=int, default=1024, help="tokens of a prompt and its text, at most the model's context"
    )
    parser.add_argument(
        "--cache-tokens", type=int,
        help="for all texts of a replica together, 32 a page; without it as many as all its --slots may have",
    )  # fmt: skip
    parser.add_argument("--queue", type=int, default=256, help="texts that may wait for a slot")
    parser.add_argument("--queue-time", type=float, default=60.0, help="seconds that a text may wait for a slot")
    parser.add_argument("--time", type=float, default=600.0, help="seconds that an answer may take")
    parser.add_argument("--body", type=int, default=1 << 20, help="bytes of a request")
    parser.add_argument("--body-time", type=float, default=10.0, help="seconds in which a request has to arrive")
    parser.add_argument(
        "--origin", action="append", default=[], help="pages from there may ask, as https://example.org, or * from "
        "anywhere; may stand several times (CORS; without it browsers let no page of another site)",
    )  # fmt: skip
    parser.add_argument("--drain", type=float, default=30.0, help="seconds that running texts have after Ctrl-C")
    add_type_options(
        parser,
        "of weights: quantized, as a .gguf file has them (less memory, for up to 16 texts at once less time; the "
        "default, but for more --slots without --activations int8), or what they are decoded to; a folder's: float32",
    )
    args = parser.parse_args()
    for origin in args.origin:
        if origin != "*" and (not origin.startswith(("http://", "https://")) or origin.count("/") != 2):
            parser.error(f"--origin {origin}: * or a page's scheme and host, as https://example.org")
    for name, value in vars(args).items():
        least = 0 if name in ("port", "drain") or isinstance(value, float) else 1
        if isinstance(value, (int, float)) and value < least:
            parser.error(f"--{name.replace('_', '-')} {value}: at least {least}")
    if world.size % args.replicas:
        parser.error(
            f"--replicas {args.replicas}: the nodes are {world.size}, which is no multiple of it; launcher --nodes "
            f"{-(-world.size // args.replicas) * args.replicas} makes groups of one size"
        )
    return args


def main() -> None:
    args = options()
    ranks = Ranks(args.replicas)
    devices = ranks.devices
    scheduler = Scheduler(args.queue, args.queue_time)
    if world.rank == 0:
        # Ctrl-C of the launcher comes here, too, if it has heard in time that there is a handler: so it stands long
        # before anybody may count on it (the other ranks hear of it by `Ranks`)
        signal.signal(signal.SIGINT, lambda number, frame: interrupted(scheduler, args.drain))
    try:
        listener = listen(args.host, args.port) if world.rank == 0 else None
        dtype = args.dtype or dtype_for(args.slots, args.activations)
        model, tokenizer = load(args.model, dtype, args.activations, devices)
        encoder = load_encoder(args.embed_model) if args.embed_model else None
    except (ValueError, OSError) as error:
        raise SystemExit(f"manygrad.llm.serve: {error}") from None
    # every block of a prompt fits, the last one too
    max_model_len = -(-min(args.max_model_len, model.config.context) // BLOCKS[-1]) * BLOCKS[-1]
    model.reserve_pages(args.cache_tokens or args.slots * max_model_len, max_model_len, args.cache_dtype)
    if len(devices) > 1:
        nn.shard_rules(model, rules(model, devices), devices)
    Tensor.realize(*model.parameters(), *model.buffers())
    batch = Batch(Steps(model, args.slots, max_model_len), tokenizer.ends)
    embedder = None
    if encoder is not None:
        nn.shard_rules(encoder[0], {}, world.devices)
        Tensor.realize(*encoder[0].parameters())
        embedder = Embedder(*encoder, batch=16)
    batch.warm_up()
    if listener is None:
        run(batch, embedder, ranks, None)
        return
    scheduler.reports = [report(batch, [])] * args.replicas
    service = Service(
        scheduler, tokenizer, args.name or args.model, min(batch.most, model.config.context), args.slots,
        batch.pages.count,
        args.embed_model or "", None if encoder is None else encoder[1],
        0 if encoder is None else encoder[0].config.context, Limits(args.body, args.body_time, args.time),
        origins=args.origin,
    )  # fmt: skip
    serve(service, listener, partial(run, batch, embedder, ranks, scheduler), args.drain)


def interrupted(scheduler: Scheduler, drain_s: float) -> None:
    if scheduler.loop is None:  # nothing is served yet
        raise KeyboardInterrupt
    scheduler.drain(drain_s)


def serve(service: Service, listener: socket.socket, write: Callable[[], None], drain_s: float) -> None:
    """The event loop has a thread of its own; the model's loop, `write`, runs here, where signals and the launcher come
    to."""
    scheduler = service.scheduler
    protocol: Any = partial(Connection, service.limits.body_s)
    config = uvicorn.Config(service.application(), log_level="warning", access_log=False, ws="none",
                            http=protocol,
                            timeout_graceful_shutdown=2, lifespan="on")  # fmt: skip
    server = uvicorn.Server(config)

    def listening() -> None:
        try:
            server.run([listener])
        finally:
            scheduler.drain(0)  # (without it nobody could ask for anything, nor end the model's loop)

    threads = Threads()
    web = threads.start("manygrad-web", listening)
    limit = time.monotonic() + START_S
    while not server.started:
        if not web.is_alive() or time.monotonic() > limit:
            text = "manygrad.llm.serve: the web server did not start; what it wrote above says why"
            raise SystemExit(text) from web.error
        time.sleep(0.01)

    if world.size == 1:  # (else it is how the launcher ends what did not end by itself)
        signal.signal(signal.SIGTERM, lambda number, frame: scheduler.drain(drain_s))
    host, port = listener.getsockname()[:2]
    print(f"listening on http://{host}:{port}", flush=True)
    cause = "the server is shutting down"
    try:
        write()
    except BaseException as error:
        cause = f"the model has stopped: {type(error).__name__}: {error}"
        raise
    finally:
        scheduler.close(cause)
        server.should_exit = True
        threads.close(3)
    if web.error is not None:
        raise SystemExit("manygrad.llm.serve: the web server has ended by the error above") from web.error


def listen(host: str, port: int) -> socket.socket:
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except OSError as error:
        raise ValueError(f"--host {host} --port {port}: {error.strerror}; choose another one, or 0") from None
    return found


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
