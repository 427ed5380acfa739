"""`headrace` whose `up` starts the stand-ins instead of the daemons, and is less patient with them; else the real command."""

from __future__ import annotations

import sys

from console import cli, launch
from console.children import StopTimes
from console.up import Commands

STAND_IN = (sys.executable, "-m", "tests.console.stand_ins")
TIMES = StopTimes(drain_s=1.0, insist_s=0.5, kill_s=10.0)


def main() -> int:
    if sys.argv[1] != "up":
        return cli.main()
    commands = Commands(trainer=(*STAND_IN, "trainer"), rollouter=(*STAND_IN, "rollouter"))
    return launch.up(None, sys.argv[2:], commands=commands, times=TIMES)


if __name__ == "__main__":
    sys.exit(main())
