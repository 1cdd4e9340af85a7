"""The launcher over a real Ray on several machines: what `docs/launching.md` says of them."""

from __future__ import annotations

import ast
import json
import re
import secrets
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.launcher.ray_on_machines import WORKER_PORTS, RayOnMachines, ray_on_machines

COUNT = 3


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayOnMachines]:
    with ray_on_machines(COUNT, tmp_path_factory.mktemp("shared")) as c:
        yield c


def said(out: str) -> list[dict[str, Any]]:
    """What each rank has printed as a dictionary."""
    return [ast.literal_eval(line[line.index("{") :]) for line in out.splitlines() if "{" in line]


LISTENING = """
import os, socket, sys, time
from pathlib import Path
import numpy as np
import beside
from manygrad import Tensor, world
from manygrad.runtime.current import current

x = Tensor(np.ones((world.size, 64), np.float32)).shard(world.devices, axis=0)
assert (x.sum(0).numpy() == world.size).all()
print(dict(rank=world.rank, host=socket.gethostname(), args=sys.argv, folder=os.getcwd(), beside=beside.WHAT,
    text=Path("data.txt").read_text(), mine=os.environ.get("MINE"), not_mine=os.environ.get("NOT_MINE"),
    seed=os.environ.get("SEED"), started=os.environ.get("STARTED"),
    routes=current().communication.endpoint.routes, local=os.environ["LOCAL_RANK"],
    master=os.environ["MASTER_ADDR"]), flush=True)
Path(f"there{world.rank}").touch()
while not Path("go").exists():
    time.sleep(0.02)
"""


def listening(cluster: RayOnMachines, i: int) -> list[str]:
    """Addresses on which anything but Ray listens on machine i. (The launcher is one of Ray's drivers, too.)"""
    shown = subprocess.check_output([*cluster.hosts.prefixes[i], "ss", "-ltnpH"], text=True)
    found = [line.split()[3].rpartition(":") for line in shown.splitlines() if not re.search(r"ray|gcs_server", line)]
    return [address for address, _, port in found if int(port) not in WORKER_PORTS]


@pytest.mark.parametrize("host", [0, 2])
def test_scripts_find_their_folder_arguments_and_each_other(cluster: RayOnMachines, host: int) -> None:
    """From the head, and from another machine."""
    files = {"beside.py": "WHAT = 'a module'", "data.txt": "data"}
    env = {"MANYGRAD_ENV": "MINE", "MINE": "1", "NOT_MINE": "1", "SEED": "3"}
    run = cluster.launch(LISTENING, "--lr", "0.1 a", host=host, beside=files, **env)
    folder = run.run_dir.parent
    for r in range(COUNT):
        run.until(folder / f"there{r}")
    for i, address in enumerate(cluster.hosts.addresses):
        found = listening(cluster, i)
        assert set(found) == {address} and len(found) >= 2, (i, found)
    (folder / "go").touch()
    run.wait()
    assert run.code == 0, run.err
    ranks = sorted(said(run.out), key=lambda d: d["rank"])
    assert sorted(d["host"] for d in ranks) == [f"host{i}" for i in range(COUNT)]
    where = {f"host{i}": a for i, a in enumerate(cluster.hosts.addresses)}
    for r, d in enumerate(ranks):
        assert d["routes"] == {p: "zmq" for p in range(COUNT) if p != r}
        assert (d["args"], d["folder"]) == (["train.py", "--lr", "0.1 a"], str(folder))
        assert (d["beside"], d["text"], d["mine"], d["not_mine"], d["seed"]) == ("a module", "data", "1", None, "3")
        assert d["started"] == d["host"], "the rest of the environment is that of `ray start`"
        assert (d["local"], d["master"]) == ("0", where[ranks[0]["host"]])
    cluster.nothing_is_left()


SECRET = """
import json, socket
from pathlib import Path
import numpy as np
from manygrad import Tensor, world

secret, clear, printed, address = json.loads(Path("words.json").read_text())
words = np.frombuffer(bytes.fromhex(secret) * 1000, np.int32).copy()
if world.rank == 0:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        s.sendto(bytes.fromhex(clear), (address, 9))
x = Tensor(np.concatenate([words] * world.size)).shard(world.devices, axis=0)
print(bytes.fromhex(printed).decode())
assert (x.numpy() == np.concatenate([words] * world.size)).all()
"""
WATCH = """
import select, socket, sys
s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
s.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
print("ready", flush=True)
seen, words = bytearray(), [bytes.fromhex(w) for w in sys.argv[1:]]
while True:
    if select.select([s], [], [], 0.1)[0]:
        seen += s.recv(1 << 17)
    elif select.select([sys.stdin], [], [], 0)[0]:
        break
print(len(seen), *(w in seen for w in words))
"""


def test_between_machines_all_is_encrypted(cluster: RayOnMachines) -> None:
    """Who listens at the switch finds what a script sends in the clear, and neither tensors nor what ranks print.
    (A script's arguments he may find: Ray takes them to the machines.)"""
    printed = secrets.token_hex(8)
    words = [secrets.token_hex(16), secrets.token_hex(16), printed.encode().hex()]
    watch = subprocess.Popen(
        ["ip", "netns", "exec", cluster.hosts.switch, sys.executable, "-I", "-S", "-c", WATCH, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert watch.stdout is not None and watch.stdout.readline() == "ready\n"
        nobody = cluster.hosts.addresses[0].rpartition(".")[0] + ".255"  # (goes to all)
        files = {"words.json": json.dumps([*words, nobody])}
        run = cluster.launch(SECRET, beside=files).wait()
        assert run.code == 0 and printed in run.out, run.err
        nbytes, *found = watch.communicate("end\n", timeout=30)[0].split()
    finally:
        watch.kill()
    assert int(nbytes) > COUNT * 16000 and found == ["False", "True", "False"], (nbytes, found)


def test_a_rank_that_raises_ends_all(cluster: RayOnMachines) -> None:
    script = """
        import time
        from manygrad import Tensor, world
        import numpy as np
        x = Tensor(np.ones((world.size, 8), np.float32)).shard(world.devices, axis=0)
        while True:
            x.sum(0).numpy()
            if world.rank == 1:
                raise ValueError("bad batch")
    """
    run = cluster.launch(script, host=1).wait()
    assert run.code == 1 and "rank 1 failed: ValueError: bad batch" in run.err, run.err
    assert re.search(r"node 1 \(host\d\), rank 1, .* at train.py:9", run.err), run.err
    stopped = re.findall(r"^  ranks? ([0-9, ]+): stopped: \w+ at train.py:[78]", run.err, re.M)
    assert sorted(", ".join(stopped).split(", ")) == ["0", "2"], run.err
    assert run.report["root_cause"]["rank"] == 1
    cluster.nothing_is_left()


def test_the_exit_code_is_the_first_failing_ranks(cluster: RayOnMachines) -> None:
    script = """
        import sys, time
        from manygrad import world
        if world.rank == 2:
            sys.exit(7)
        time.sleep(60)
    """
    assert cluster.launch(script).wait().code == 7


def test_a_folder_that_each_machine_has_a_copy_of(cluster: RayOnMachines) -> None:
    """Where only the launcher has it, the error says what is needed."""
    copy = "mkdir /tmp/copy && cd /tmp/copy && echo \"print('trained')\" > train.py"
    launcher = [
        sys.executable,
        "-P",
        "-m",
        "manygrad.launcher.cli",
        "train.py",
        "--nodes",
        str(COUNT),
        "--log-ranks=all",
    ]
    try:
        assert cluster.on(0, "sh", "-c", copy).wait(10) == 0
        process = cluster.on(0, *launcher, "--address", cluster.address, folder="/tmp/copy")
        err = process.communicate(timeout=60)[1]
        assert process.returncode == 127, err
        assert re.search("folder /tmp/copy does not exist on host[12]: start from a folder that all nodes have", err), (
            err
        )
        assert [cluster.on(i, "sh", "-c", copy).wait(10) for i in range(1, COUNT)] == [0, 0]
        process = cluster.on(0, *launcher, "--address", cluster.address, folder="/tmp/copy")
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0 and out.count("trained") in (1, COUNT), (out, err)
    finally:
        for i in range(COUNT):
            cluster.on(i, "rm", "-r", "/tmp/copy").wait(10)
    cluster.nothing_is_left()


def test_results_of_a_function_come_back(cluster: RayOnMachines) -> None:
    """`launch` in a program on a machine of the cluster."""
    program = """
        import os, socket, sys
        from manygrad import launch

        def work(factor):
            from manygrad import world
            return world.rank * factor, socket.gethostname(), bytes(300_000)

        if __name__ == "__main__":
            results = launch(work, 5, nodes=3, address=sys.argv[1], run_dir="run")
            print([r[0] for r in results], sorted(r[1] for r in results), {len(r[2]) for r in results})
    """
    folder = cluster.shared / "program"
    folder.mkdir()
    (folder / "program.py").write_text(textwrap.dedent(program))
    process = cluster.on(1, sys.executable, "-P", "program.py", cluster.address, folder=folder)
    out, err = process.communicate(timeout=60)
    assert out == "[0, 5, 10] ['host0', 'host1', 'host2'] {300000}\n", (out, err)
    cluster.nothing_is_left()


def test_ctrl_c_leaves_nothing(cluster: RayOnMachines) -> None:
    script = """
        import os, subprocess, sys, time
        from manygrad import world
        from pathlib import Path
        subprocess.Popen(["sleep", "1000"], start_new_session=True, env={})
        Path(f"there{world.rank}").touch()
        time.sleep(60)
    """
    run = cluster.launch(script)
    for r in range(COUNT):
        run.until(run.run_dir.parent / f"there{r}")
    run.interrupt()
    assert run.wait().code == 130, run.err
    cluster.nothing_is_left()


def test_a_machine_that_is_cut_off_is_named(cluster: RayOnMachines) -> None:
    """Within the time that is promised; what runs there ends by itself.
    (The last test, as Ray may give the machine up.)"""
    script = """
        import time
        from manygrad import Tensor, world
        from pathlib import Path
        import numpy as np
        x = Tensor(np.ones((world.size, 8), np.float32)).shard(world.devices, axis=0)
        while True:
            x.sum(0).numpy()
            Path(f"there{world.rank}").touch()
            time.sleep(0.05)
    """
    run = cluster.launch(script, RECONNECT_TIMEOUT_S="3", HEARTBEAT_TIMEOUT_S="8")
    for r in range(COUNT):
        run.until(run.run_dir.parent / f"there{r}")
    cluster.hosts.down(2)
    try:
        began = time.monotonic()
        run.wait()
        took_s = time.monotonic() - began
        assert run.code == 1 and took_s < 40, (took_s, run.err)
        (lost,) = [r["rank"] for r in run.report["ranks"] if r["host"] == "host2"]
        assert f"rank {lost} failed: " in run.err and f"node {lost} (host2), rank {lost}" in run.err, run.err
        assert "its host has not answered for 3 s (the knob is RECONNECT_TIMEOUT_S)" in run.err, run.err
    finally:
        cluster.hosts.up(2)
    cluster.nothing_is_left()
