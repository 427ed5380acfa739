"""Fuzzes everything that reads bytes which others wrote: `python -m tests.fuzz.decoder --seconds 60`.

Runs on atheris (libFuzzer) where that is installed, else on the engine beside this file. Exit code 1 if a defect was found; the
input and the traceback are then in `--defects`. `--replay FILE` runs one such input again.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import logging
import sys
import tempfile
from pathlib import Path

import structlog

MAX_BYTES = 70_000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.decoder", description=__doc__)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--engine", choices=("auto", "atheris", "own"), default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", action="append", help="only this reader (may be given again)")
    parser.add_argument("--defects", type=Path, default=Path("fuzz-defects"), help="directory for inputs that found something")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run one such input (its name begins with its target's)")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    if arguments.replay:
        return _replay(arguments.replay)
    has_atheris = importlib.util.find_spec("atheris") is not None
    if arguments.engine == "atheris" or (arguments.engine == "auto" and has_atheris):
        return _with_atheris(arguments)
    return _with_own(arguments)


def _with_own(arguments: argparse.Namespace) -> int:
    from tests.fuzz.engine import Engine
    from tests.fuzz.seeds import seeds
    from tests.fuzz.targets import TARGETS

    targets = [target for target in TARGETS if not arguments.target or target.name in arguments.target]
    engine = Engine(targets, seeds(), seed=arguments.seed, defects_dir=arguments.defects)
    for left in engine.run(arguments.seconds):
        done = sum(progress.executions for progress in engine.progress)
        sys.stderr.write(f"\r{left:5.0f} s left, {done:,} inputs, {sum(p.defects for p in engine.progress)} defects")
    sys.stderr.write("\n")
    lines = [f"{'reader':<16}{'inputs':>10}{'kept':>7}{'edges':>7}{'slowest ms':>12}{'peak KiB':>10}{'defects':>9}"]
    lines += [
        f"{progress.target.name:<16}{progress.executions:>10,}{len(progress.corpus):>7}{len(progress.edges):>7}"
        f"{progress.slowest_s * 1000:>12.1f}{progress.peak_bytes / 1024:>10.0f}{progress.defects:>9}"
        for progress in engine.progress
    ]
    done, found = (sum(getattr(each, name) for each in engine.progress) for name in ("executions", "defects"))
    lines.append(f"{done:,} inputs, {found} defects" + (f": see {arguments.defects}" if found else ""))
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if found else 0


def _with_atheris(arguments: argparse.Namespace) -> int:
    atheris = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["sample_bus"]):
        from tests.fuzz.seeds import seeds
        from tests.fuzz.targets import PROMISED, TARGETS

    targets = [target for target in TARGETS if not arguments.target or target.name in arguments.target]

    def one_input(data: bytes) -> None:
        """The first byte chooses the reader."""
        if not data:
            return
        try:
            targets[data[0] % len(targets)].run(data[1:])
        except PROMISED:
            pass

    with tempfile.TemporaryDirectory(prefix="hr-corpus-") as corpus:
        given = seeds()
        for number, target in enumerate(targets):
            for count, data in enumerate(given[target.name]):
                (Path(corpus) / f"{target.name}-{count}").write_bytes(bytes([number]) + data)
        arguments.defects.mkdir(parents=True, exist_ok=True)
        options = {
            "max_total_time": arguments.seconds,
            "max_len": MAX_BYTES,
            "rss_limit_mb": 1024,
            "timeout": 10,
            "seed": arguments.seed + 1,
            "print_final_stats": 1,
            "artifact_prefix": f"{arguments.defects}/",
        }
        atheris.Setup([sys.argv[0], *(f"-{name}={value}" for name, value in options.items()), corpus], one_input)
        atheris.Fuzz()  # ends the process
    return 0


def _replay(path: Path) -> int:
    from tests.fuzz.targets import PROMISED, TARGETS

    target = next(target for target in TARGETS if path.name.startswith(target.name + "-"))
    try:
        target.run(path.read_bytes())
    except PROMISED as error:
        sys.stdout.write(f"{target.name}: refused as promised: {error}\n")
        return 0
    sys.stdout.write(f"{target.name}: taken\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
