"""Hosts for tests: network namespaces on one switch (a bridge in a namespace of its own),
whose links go down and up again.

They share the machine's files and its processors, and nothing of its network. Needs root and the `ip` command; where
namespaces cannot be had the test is skipped, and says why.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

_count = itertools.count()


@dataclass(frozen=True)
class Hosts:
    """`addresses[i]` of host i; a command behind `prefixes[i]` runs there."""

    names: list[str]
    addresses: list[str]

    @property
    def prefixes(self) -> list[list[str]]:
        return [["ip", "netns", "exec", n] for n in self.names]

    def down(self, i: int) -> None:
        """Take host i's link down: it reaches nobody, nobody reaches it, the others go on."""
        _ip("-n", self.names[i], "link", "set", "eth0", "down")

    def up(self, i: int) -> None:
        _ip("-n", self.names[i], "link", "set", "eth0", "up")


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True)


@contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """`count` hosts in a network of their own, gone afterwards."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the `ip` command")
    tag = f"mg{os.getpid()}-{next(_count)}"
    switch, names = f"{tag}s", [f"{tag}h{i}" for i in range(count)]
    net = f"10.{77 + os.getpid() // 250 % 100}.{os.getpid() % 250}"
    try:
        try:
            for n in (switch, *names):
                _ip("netns", "add", n)
            _ip("-n", switch, "link", "add", "br0", "type", "bridge")
            _ip("-n", switch, "link", "set", "br0", "up")
            for i, n in enumerate(names):
                _ip("-n", switch, "link", "add", f"port{i}", "type", "veth", "peer", "name", "eth0", "netns", n)
                _ip("-n", switch, "link", "set", f"port{i}", "master", "br0", "up")
                _ip("-n", n, "addr", "add", f"{net}.{i + 1}/24", "dev", "eth0")
                _ip("-n", n, "link", "set", "eth0", "up")
                _ip("-n", n, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as e:
            pytest.skip(f"this machine gives no network namespaces: {e.stderr.decode().strip()}")
        yield Hosts(names, [f"{net}.{i + 1}" for i in range(count)])
    finally:
        for n in (switch, *names):
            subprocess.run(["ip", "netns", "del", n], capture_output=True)
