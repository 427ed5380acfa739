"""What weight sync costs on one host, over every transport, beside the limit and beside other ways, in one run.

    python -m benchmarks.weights [--quick] [--json] [--sizes SIZE …] [--receivers N …] [--parts PART …]
                                 [--source float32|bfloat16]

Parts: `transports` (from the weights in the trainer's process to verified bfloat16 weights in every receiver's), `peers`
(see `weights_peers`), `deltas` (rounds in which a share of the elements changes), `engine` (a real vLLM engine, see
`weights_engine`). Every receiver is a process. GB are 10^9 bytes of the bfloat16 model; each figure is the best of several
rounds after those that fault the memory in. A case that needs more memory than the machine has free is left out, and said.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import structlog
import torch

from benchmarks.weights_model import SHAPES, Model
from benchmarks.weights_peers import cast_seconds, gloo_seconds, memcpy_seconds, request_reply_seconds, tmpfs_seconds
from benchmarks.weights_receivers import Receivers, available_bytes, receivers
from benchmarks.weights_transports import Case, Figures, measure
from weight_sync import WeightSyncError

SIZES = ("0.27 GB", "1 GB", "4 GB")
QUICK_SIZES = ("0.03 GB",)
RECEIVERS = (1, 2, 4)
QUICK_RECEIVERS = (1, 2)
PARTS = ("transports", "peers", "deltas", "engine")
CHANGED = (0.002, 0.02, 0.1)
"""Shares of the elements: steps of AdamW at learning rates of 1e-6, 1e-5 and 1e-4 change about so many."""
RESERVE_BYTES = 2 << 30
ENGINE_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way to bring one model to so many receivers."""

    way: str
    size: str
    num_bytes: int
    num_receivers: int
    seconds: float
    gb_per_s: float
    of_memcpy: float
    """Seconds of a plain copy of the model over these."""
    figures: Figures | None = None
    """Of our own transports."""


def name_of(case: Case) -> str:
    """Such as `tcp delta 2 %`."""
    words: list[str] = [case.transport]
    if case.verify == "never":
        words.append("unverified")
    if case.encoding == "delta":
        words.append(f"delta {case.changed:.1%}")
    return " ".join(words)


def needed_bytes(case: Case, model: Model) -> int:
    """Of a case, about: what the trainer holds, what each receiver holds."""
    held = 1 if case.transport == "shared_memory" else 1 + 2 * case.num_receivers
    return (2 + held) * model.num_bytes


class Bench:
    """One run; rows are printed as they come."""

    def __init__(self, fleet: Receivers, *, repetitions: int) -> None:
        self.rows: list[Row] = []
        self.failed: list[str] = []
        self._fleet = fleet
        self._repetitions = repetitions
        self._memcpy_s = 0.0

    def limits(self, size: str, model: Model) -> None:
        self._memcpy_s = memcpy_seconds(model.num_bytes, self._repetitions)
        self._add("memcpy", size, model, 0, self._memcpy_s, None)
        if model.is_cast:
            self._add("cast alone", size, model, 0, cast_seconds(model, self._repetitions), None)

    def peers(self, size: str, model: Model, num: int) -> None:
        ways: tuple[tuple[str, Callable[..., float], int], ...] = (
            ("request-reply 512 MB", request_reply_seconds, num),
            ("safetensors tmpfs", tmpfs_seconds, num + 2),
            ("gloo broadcast", gloo_seconds, num + 1),
        )
        for way, function, copies in ways:
            if self._fits(way, size, num, copies * model.num_bytes):
                seconds = function(model, num, self._fleet, repetitions=self._repetitions)
                self._add(way, size, model, num, seconds, None)

    def sync(self, size: str, model: Model, case: Case) -> None:
        way = name_of(case)
        if not self._fits(way, size, case.num_receivers, needed_bytes(case, model)):
            return
        try:
            figures = measure(model, case, self._fleet, repetitions=self._repetitions)
        except (RuntimeError, ValueError, WeightSyncError) as error:
            self.failed.append(f"{way}, {size}, {case.num_receivers} receivers: {error}")
            sys.stdout.write(f"{self.failed[-1]}\n")
            return
        self._add(way, size, model, case.num_receivers, figures.total_s, figures)

    def _fits(self, way: str, size: str, num: int, needed: int) -> bool:
        fits = needed + RESERVE_BYTES <= available_bytes()
        if not fits:
            sys.stdout.write(f"{way}, {size}, {num} receivers: left out, it needs {needed / 1e9:.0f} GB\n")
        return fits

    def _add(self, way: str, size: str, model: Model, num: int, seconds: float, figures: Figures | None) -> None:
        row = Row(
            way=way,
            size=size,
            num_bytes=model.num_bytes,
            num_receivers=num,
            seconds=seconds,
            gb_per_s=model.num_bytes / seconds / 1e9,
            of_memcpy=self._memcpy_s / seconds,
            figures=figures,
        )
        self.rows.append(row)
        line = f"{size:>8}  {way:<26}{num:>3}  {seconds:>8.3f} s {row.gb_per_s:>7.2f} GB/s {row.of_memcpy:>6.0%} of memcpy"
        if figures is not None:
            line += (
                f"   publish {figures.publish_s * 1e3:.0f} ms, stage {figures.stage_s * 1e3:.0f} ms, sent "
                f"{figures.payload_bytes / model.num_bytes:.1%}; CPU {figures.sender_cpu_s * 1e3:.0f} + "
                f"{figures.receiver_cpu_s * 1e3:.0f} ms; peak {figures.sender_peak_bytes / 1e6:.0f} + "
                f"{figures.receiver_peak_bytes / 1e6:.0f} MB, all {figures.all_bytes / 1e6:.0f} MB"
            )
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def cases(parts: Sequence[str], num_receivers: Sequence[int]) -> Iterator[Case]:
    for num in num_receivers:
        if "transports" in parts:
            yield Case(transport="shared_memory", num_receivers=num)
            yield Case(transport="shared_memory", num_receivers=num, verify="never")
            yield Case(transport="tcp", num_receivers=num)
            yield Case(transport="collective", num_receivers=num)
            yield Case(transport="file", num_receivers=num)
        if "deltas" in parts:
            for changed in CHANGED:
                yield Case(transport="tcp", num_receivers=num, encoding="delta", changed=changed)


def ratios(rows: Sequence[Row], engine: dict[str, dict[str, float]] | None) -> dict[str, float]:
    """What the targets are about, by name; of the sizes and receivers that were measured."""
    seconds = {(row.size, row.way, row.num_receivers): row.seconds for row in rows}
    found: dict[str, float] = {}
    for size in dict.fromkeys(row.size for row in rows):
        pairs = (
            ("shared_memory unverified, of memcpy (target 0.70)", "memcpy", 0, "shared_memory unverified", 1),
            ("shared_memory verified, of memcpy (target 0.55)", "memcpy", 0, "shared_memory", 1),
            ("shared_memory unverified, of the cast alone", "cast alone", 0, "shared_memory unverified", 1),
            ("shared_memory verified, of the cast alone", "cast alone", 0, "shared_memory", 1),
            ("shared_memory, over request-reply (target 3)", "request-reply 512 MB", 1, "shared_memory", 1),
            ("shared_memory to 4, over 4 copies", "memcpy", 0, "shared_memory", 4),
        )
        for name, slow, slow_num, fast, fast_num in pairs:
            slow_s, fast_s = seconds.get((size, slow, slow_num)), seconds.get((size, fast, fast_num))
            if slow_s is not None and fast_s is not None:
                found[f"{size}: {name}"] = slow_s / fast_s * (4 if name.endswith("4 copies") else 1)
    for row in rows:
        gloo_s = seconds.get((row.size, "gloo broadcast", row.num_receivers))
        if row.figures is not None and row.way == "tcp" and gloo_s is not None:
            name = f"{row.size}: staging over tcp to {row.num_receivers}, over gloo's broadcast (target 1.2 to one)"
            found[name] = gloo_s / row.figures.stage_s
        if row.figures is not None and "delta" in row.way:
            share = row.figures.payload_bytes / row.num_bytes
            found[f"{row.size}: {row.way} to {row.num_receivers}, bytes of full (target 0.10)"] = share
        if row.figures is not None and row.way == "shared_memory" and row.num_receivers == 4:
            found[f"{row.size}: copies in memory, trainer and 4 receivers"] = row.figures.all_bytes / row.num_bytes
    if engine is not None:
        ours, reload = engine["ours"], engine["reload_weights"]
        transfer_s = ours["prepare_s"] + ours["pause_ms"] / 1e3
        found["engine: pause of the whole sync (target 0.25)"] = ours["pause_ms"] / 1e3 / transfer_s
        found["engine: pause of reload_weights' pause"] = ours["pause_ms"] / reload["pause_ms"]
        found["engine: until the first token, of reload_weights'"] = ours["until_first_token_s"] / reload["until_first_token_s"]
    return found


def engine_figures(*, quick: bool) -> dict[str, dict[str, float]]:
    """In a process of its own, as vLLM takes over whichever it is in."""
    command = [sys.executable, "-m", "benchmarks.weights_engine", *(["--quick"] if quick else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ENGINE_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights", description="What weight sync costs on one host.")
    parser.add_argument("--quick", action="store_true", help="a small model, one or two receivers, few rounds")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--sizes", nargs="+", choices=tuple(SHAPES), default=None)
    parser.add_argument("--receivers", type=int, nargs="+", default=None)
    parser.add_argument("--repetitions", type=int, default=None, help="rounds that count (default 7, with --quick 3)")
    parser.add_argument("--source", choices=("float32", "bfloat16"), default="float32", help="dtype of the trainer's weights")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    arguments = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    quick: bool = arguments.quick
    num_receivers = arguments.receivers or (QUICK_RECEIVERS if quick else RECEIVERS)
    with receivers(max(num_receivers)) as fleet:
        bench = Bench(fleet, repetitions=arguments.repetitions or (3 if quick else 7))
        for size in arguments.sizes or (QUICK_SIZES if quick else SIZES):
            model = Model(SHAPES[size], getattr(torch, arguments.source))
            bench.limits(size, model)
            for case in cases(arguments.parts, num_receivers):
                bench.sync(size, model, case)
            for num in num_receivers if "peers" in arguments.parts else ():
                bench.peers(size, model, num)
            del model
    engine = engine_figures(quick=quick) if "engine" in arguments.parts else None
    if engine is not None:
        for way in ("ours", "reload_weights"):
            figures = engine[way]
            sys.stdout.write(
                f"engine, {way:<15} before {figures['prepare_s'] * 1e3:.0f} ms, pause {figures['pause_ms']:.0f} ms, first "
                f"token {figures['first_token_ms']:.0f} ms later, {figures['until_first_token_s'] * 1e3:.0f} ms in all\n"
            )
    found = ratios(bench.rows, engine)
    sys.stdout.writelines(f"{value:>8.2f}  {name}\n" for name, value in found.items())
    if arguments.json:
        rows = [asdict(row) for row in bench.rows]
        print(json.dumps({"source": arguments.source, "rows": rows, "failed": bench.failed, "engine": engine, "ratios": found}))
    return 1 if bench.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
