"""`launcher` for tests over several hosts without a Ray on them: `python on_hosts.py HOSTS -- train.py --nodes N ...`,
run on the launcher's.

HOSTS is `address,namespace` of the launcher and of each rank, with `;` between them (`tests/hosts.py`). What Ray would
do is done here: say where the ranks are, and start their supervisors there. The launcher's sweep does not reach another
host, so it does not sweep here.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

from manygrad.errors import Infeasible
from manygrad.launcher import agent, cli, driver
from manygrad.launcher.cluster import Cluster
from manygrad.launcher.places import Place

_START = """
import json, os, sys
from importlib.util import module_from_spec, spec_from_file_location
found = spec_from_file_location("agent", sys.argv[1])
agent = module_from_spec(found)
found.loader.exec_module(agent)
agent.start(json.loads(sys.stdin.readline()), b"", sys.argv[2:], os.dup(1))
"""


class Placed(Cluster):
    hosts: list[tuple[str, str]]  # address and namespace

    def start(self) -> None:
        pass

    def place(self, n: int = 0, wait_s: float = 0.0) -> list[Place]:
        self.places = [Place(f"host{r}", address, 1, 0, 1) for r, (address, _) in enumerate(self.hosts[1:])]
        return self.places

    def again(self, least: int, give_up: Callable[[], bool]) -> list[Place]:
        """On the hosts whose links are up, as a cluster would know it."""
        self._let_go(range(len(self.places)))
        self.hosts = [self.hosts[0], *(h for h in self.hosts[1:] if _is_up(h[1]))]
        if len(self.hosts) <= least:
            raise Infeasible(f"{len(self.hosts) - 1} hosts are left, of at least {least}")
        return self.place()

    @property
    def driver_ip(self) -> str:
        return self.hosts[0][0]

    def keeps(self, ready: Container[int]) -> bool:
        """A host that is cut off has none of its agents left."""
        return False

    def run(self, specs: dict[int, dict[str, Any]], payload: bytes) -> None:
        command = [sys.executable, "-P", "-c", _START, str(agent.__file__), str(Path(agent.__file__).parents[1])]
        for rank, spec in specs.items():
            prefix = ["ip", "netns", "exec", self.hosts[1 + rank][1]]
            given = json.dumps(spec)
            subprocess.run([*prefix, *command], input=given, text=True, stdout=subprocess.DEVNULL, check=True)


def _is_up(namespace: str) -> bool:
    shown = subprocess.run(["ip", "-n", namespace, *"link show eth0".split()], capture_output=True, text=True)
    return "state UP" in shown.stdout


if __name__ == "__main__":
    Placed.hosts = [(a, n) for a, _, n in (h.partition(",") for h in sys.argv[1].split(";"))]
    driver.Cluster = Placed  # type: ignore[misc]
    driver.sweep = lambda job, folder: shutil.rmtree(folder, ignore_errors=True)  # type: ignore[assignment]
    sys.argv[0:3] = ["launcher"]
    cli.main()
