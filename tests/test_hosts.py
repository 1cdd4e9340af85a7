"""The hosts that other tests run on: what their links carry, lose and delay, and what machines share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts import Hosts, hosts
from tests.machines import child_of, files, machines, processes

LISTEN = """
import socket, sys
with socket.create_server((sys.argv[1], 5000)) as s:
    print("ready", flush=True)
    while True:
        with s.accept()[0] as c:
            while c.recv(1 << 16):
                pass
            c.sendall(b"all")
"""
SEND = """
import socket, sys, time
began = time.perf_counter()
with socket.create_connection((sys.argv[1], 5000)) as s:
    s.sendall(bytes(int(sys.argv[2])))
    s.shutdown(socket.SHUT_WR)
    assert s.recv(16) == b"all"
print(time.perf_counter() - began)
"""


ECHO = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.bind((sys.argv[1], 5000))
    print("ready", flush=True)
    while True:
        s.sendto(*s.recvfrom(100))
"""
COUNT = """
import socket, sys
back = 0
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.settimeout(float(sys.argv[3]))
    for _ in range(int(sys.argv[2])):
        s.sendto(b"datagram", (sys.argv[1], 5000))
        try:
            back += s.recv(100) == b"datagram"
        except TimeoutError:
            pass
print(back)
"""


def python(h: Hosts, i: int, *command: str) -> list[str]:
    return [*h.prefixes[i], sys.executable, "-I", "-S", "-c", *command]


class Receiver:
    """Host 1 takes what is sent to it."""

    def __init__(self, h: Hosts, program: str = LISTEN) -> None:
        self.hosts, self.program = h, program

    def __enter__(self) -> Receiver:
        command = python(self.hosts, 1, self.program, self.hosts.addresses[1])
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None and self.process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.communicate()

    def seconds(self, nbytes: int) -> float:
        """How long so many bytes take from host 0."""
        return float(self._ask(SEND, nbytes))

    def echoed(self, count: int, timeout_s: float) -> int:
        """How many datagrams of so many come back to host 0, each waited for so long."""
        return int(self._ask(COUNT, count, timeout_s))

    def _ask(self, program: str, *numbers: float) -> str:
        command = python(self.hosts, 0, program, self.hosts.addresses[1], *map(str, numbers))
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout


def lost(h: Hosts, namespace: str, interface: str) -> int:
    """Packets dropped by the class that loses them."""
    command = ["tc", "-n", namespace, "-s", "qdisc", "show", "dev", interface]
    shown = subprocess.run(command, capture_output=True, text=True).stdout
    return int(shown.partition("pfifo")[2].partition("dropped ")[2].partition(",")[0])


@pytest.mark.parametrize("limited", [0, 1])
def test_a_link_carries_what_its_limit_says(limited: int) -> None:
    """Both ways: the one host sends through its link, the other receives."""
    with hosts(2) as h:
        h.limit(limited, 200e6)
        with Receiver(h) as r:
            r.seconds(1000)
            assert 5e6 / r.seconds(5_000_000) < 200e6 / 8 * 1.35
        h.limit(limited)
        with Receiver(h) as r:
            assert r.seconds(50_000_000) < 50e6 / (200e6 / 8), "the limit is still there"


def test_a_link_loses_packets() -> None:
    """Datagrams, as nothing asks for them again: TCP gives up a connection whose first packets are lost too often."""
    with hosts(2) as h, Receiver(h, ECHO) as r:
        assert r.echoed(1, timeout_s=20) == 1, (
            "the hosts know each other's addresses now, so that none of ARP's packets is missed"
        )
        h.limit(0, loss=0.2)
        assert 300 < r.echoed(600, timeout_s=0.05) < 468  # of 600 * 0.8 * 0.8 = 384, seven standard deviations or more
        assert lost(h, h.names[0], "eth0") > 0 and lost(h, h.switch, "port0") > 0


def test_a_link_delays_packets() -> None:
    with hosts(2) as h:
        h.delay(0, 0.02)
        with Receiver(h) as r:
            assert r.seconds(10) >= 0.08  # (a connection and an answer: there and back, twice)


def test_machines_share_what_is_named(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "file").write_text("here")
    (tmp_path / "file").write_text("not there")
    with machines(2, tmp_path / "shared") as h:
        assert processes(h, 0) == [] and str(tmp_path / "file") not in files(h, 0)
        for i in range(2):
            read = ["cat", str(tmp_path / "shared" / "file"), "/proc/sys/kernel/hostname"]
            assert subprocess.check_output([*h.prefixes[i], *read], text=True) == f"herehost{i}\n"
        sleeping = subprocess.Popen([*h.prefixes[0], "sleep", "1000"])
        while not processes(h, 0):
            assert sleeping.poll() is None
        assert processes(h, 0)[0].endswith(" sleep 1000") and processes(h, 1) == []
        subprocess.run([*h.prefixes[1], "touch", "/tmp/mine", "/dev/shm/mine"], check=True)
        assert [f for i in range(2) for f in files(h, i) if f.endswith("mine")] == ["/tmp/mine", "/dev/shm/mine"]
        inside = child_of(sleeping.pid)
    assert sleeping.wait(10) and not os.path.exists(f"/proc/{inside}"), "it has not ended with its machine"
    assert not os.path.exists("/dev/shm/mine")
