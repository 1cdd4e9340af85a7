"""Hosts for tests and benchmarks: network namespaces on one switch (a bridge in a namespace of its own), whose links
go down and up again, carry a limited number of bits a second, and lose packets.

They share the machine's files, processes and processors, and nothing of its network; `tests/machines.py` has hosts that
share less. As they share processes, workers on them reach each other's memory: what is to go over the network needs
TRANSPORT=zmq. Needs root and the `ip` and `tc` commands; where namespaces cannot be had the test is skipped, and says
why.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

UNLIMITED = 100e9  # bits a second, where a link has a limit of something else
QUEUE_S = 0.02  # of data waits before a link, as in the ports of a switch; what comes then is dropped
QUEUE_NBYTES = 256 << 10  # waits at least: packets here are up to 64 KiB long, as between a system and its network card
BURST_NBYTES = 64 << 10  # pass at once after a pause
CONGESTION_CONTROL = "cubic"  # of TCP: Linux's own choice; how much of a slow link one connection gets hangs on it

_count = itertools.count()


class NoHosts(RuntimeError):
    """This machine gives no namespaces; says why."""


@dataclass(frozen=True)
class Hosts:
    """`addresses[i]` of host i; a command behind `prefixes[i]` runs there."""

    switch: str  # its namespace
    names: list[str]  # the hosts' namespaces
    addresses: list[str]
    prefixes: list[list[str]]

    def down(self, i: int) -> None:
        """Take host i's link down: it reaches nobody, nobody reaches it, the others go on."""
        subprocess.run(["ip", "-n", self.names[i], *"link set eth0 down".split()], check=True)

    def up(self, i: int) -> None:
        """Up again, with a route that says nothing of congestion control: new connections have the machine's own."""
        subprocess.run(["ip", "-n", self.names[i], *"link set eth0 up".split()], check=True)

    def sent_nbytes(self, i: int) -> int:
        """What host i has put on its link so far."""
        path = "/sys/class/net/eth0/statistics/tx_bytes"
        return int(subprocess.run([*self.prefixes[i], "cat", path], check=True, capture_output=True).stdout)

    def limit(self, i: int, bits_per_s: float = UNLIMITED, loss: float = 0.0) -> None:
        """Let host i's link carry at most so much, each way, and lose this part of the packets at random."""
        for namespace, interface in (self.names[i], "eth0"), (self.switch, f"port{i}"):
            _limit(namespace, interface, bits_per_s, loss)

    def delay(self, i: int, seconds: float) -> None:
        """Let every packet to and from host i take so much longer. Raises `NoHosts` where the kernel has no netem."""
        for namespace, interface in (self.names[i], "eth0"), (self.switch, f"port{i}"):
            what = f"qdisc replace dev {interface} root netem delay {1000 * seconds:g}ms"
            _run("tc", "-n", namespace, *what.split())


def _limit(namespace: str, interface: str, bits_per_s: float, loss: float) -> None:
    """Token buckets (HTB): class 1:1 carries, 1:2 has a queue that takes nothing."""

    def tc(what: str, *args: str) -> None:
        _run("tc", "-n", namespace, *what.split(), "dev", interface, *args)

    queue = max(QUEUE_NBYTES, round(QUEUE_S * bits_per_s / 8))
    subprocess.run(["tc", "-n", namespace, "qdisc", "del", "dev", interface, "root"], capture_output=True)
    tc("qdisc add", *"root handle 1: htb default 1".split())
    for number, leaf in enumerate((f"bfifo limit {queue}", "pfifo limit 0"), 1):
        rate = f"htb rate {round(bits_per_s)}bit burst {BURST_NBYTES} cburst {BURST_NBYTES} quantum 65536"
        tc("class add", "parent", "1:", "classid", f"1:{number}", *rate.split())
        tc("qdisc add", "parent", f"1:{number}", *leaf.split())
    if loss:
        # load a random word; if it is not below the part of all words: class 0, the default; else class 1:2
        below = round(loss * 2**32)
        program = f"4,32 0 0 {2**32 - 4096 + 56},53 1 0 {below},6 0 0 {0x10002},6 0 0 0"
        tc("filter add", *"parent 1: protocol all bpf bytecode".split(), program)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NoHosts(f"{' '.join(command)}: {done.stderr.strip()}")


@contextmanager
def network(count: int, congestion_control: str = CONGESTION_CONTROL) -> Iterator[Hosts]:
    """`count` hosts in a network of their own, gone afterwards, whatever this machine's TCP has for congestion control.
    Raises `NoHosts`."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        raise NoHosts("network namespaces need root and the commands `ip` and `tc`")
    tag = f"mg{os.getpid()}-{next(_count)}"
    switch, names = f"{tag}s", [f"{tag}h{i}" for i in range(count)]
    net = f"10.{77 + os.getpid() // 250 % 100}.{os.getpid() % 250}"
    try:
        for n in (switch, *names):
            _run("ip", "netns", "add", n)
        _run("ip", "-n", switch, *"link add br0 type bridge".split())
        _run("ip", "-n", switch, *"link set br0 up".split())
        for i, n in enumerate(names):
            _run("ip", "-n", switch, *f"link add port{i} type veth peer name eth0 netns {n}".split())
            _run("ip", "-n", switch, *f"link set port{i} master br0 up".split())
            _run("ip", "-n", n, *f"addr add {net}.{i + 1}/24 dev eth0".split())
            _run("ip", "-n", n, *"link set eth0 up".split())
            _run("ip", "-n", n, *"link set lo up".split())
            # (of the route: a namespace's default may only be one that tcp_allowed_congestion_control has)
            route = f"route change {net}.0/24 dev eth0 proto kernel scope link src {net}.{i + 1}"
            _run("ip", "-n", n, *route.split(), "congctl", congestion_control)
        prefixes = [["ip", "netns", "exec", n] for n in names]
        yield Hosts(switch, names, [f"{net}.{i + 1}" for i in range(count)], prefixes)
    finally:
        for n in (switch, *names):
            subprocess.run(["ip", "netns", "del", n], capture_output=True)


@contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """As `network`, for a test, which is skipped where there is none."""
    with skipped_without(), network(count) as h:
        yield h


@contextmanager
def skipped_without() -> Iterator[None]:
    """Skip the test, with the reason, when something in here cannot be had."""
    import pytest  # (a benchmark has hosts without it)

    try:
        yield
    except NoHosts as e:
        pytest.skip(str(e))
