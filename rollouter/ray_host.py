"""Ray's driver, a process of its own: `python -m rollouter.ray_host`. The one module that imports Ray.

It reads JSON lines from standard input: first the `Order`, then calls to engines; each is answered by one JSON line.
Invariant: it ends with its standard input, that is with the rollouter, however that one ended. A Ray that was started here ends
with it, and its files are gone; should this process be killed, the kernel ends Ray's processes.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from rollouter.placement import LOOPBACK, Node, Resources, feasible, refusal
from rollouter.ray_engine import RayEngine

_OBJECT_STORE_BYTES = 80 << 20
"""Nothing travels through it; Ray takes no less than 75 MiB."""
_STOP_S = 8.0
_PINNED = 0.001
"""Share of the resource by which Ray names this node: it keeps a bundle on this host."""


class PlacementRefused(Exception):
    """Raised when Ray cannot give what the engines ask for."""


def main() -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what Ray prints goes to the log
    calls = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115 - unbuffered, for the loop reads on from it
    order = json.loads(calls.readline())
    temp_dir = order["temp_dir"]
    try:
        _serve(order, calls, answers)
    finally:
        if temp_dir is not None:
            shutil.rmtree(temp_dir, ignore_errors=True)


def _serve(order: Mapping[str, Any], calls: BinaryIO, answers: BinaryIO) -> None:
    import ray

    try:
        try:
            # In the main thread: the kernel ends Ray's processes with the thread that started them.
            _connect(order["address"], order["temp_dir"])
            asked = [Resources(**bundle) for bundle in order["bundles"]]
            nodes = _nodes()
            if feasible(asked, nodes):
                raise PlacementRefused(refusal(asked, nodes, waited_s=None))
        except Exception as error:  # noqa: BLE001 - told to the rollouter, which ends this process
            _answer(answers, 0, error=_words(error))
            return
        asyncio.run(_Host(order, asked, answers).run(calls))
    finally:
        ray.shutdown()


def _connect(address: str | None, temp_dir: str | None) -> None:
    import ray

    if address is not None:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
        return
    ray.init(
        address="local",
        num_cpus=len(os.sched_getaffinity(0)),
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        log_to_driver=False,
        configure_logging=False,
        _node_ip_address=LOOPBACK,
        _temp_dir=temp_dir,
    )
    listening = [node["NodeManagerAddress"] for node in ray.nodes()]
    if listening != [LOOPBACK]:
        raise PlacementRefused(f"Ray {ray.__version__} listens on {', '.join(listening)}, expected {LOOPBACK} only")


def _nodes() -> list[Node]:
    import ray
    from ray._private.state import available_resources_per_node

    here = ray.get_runtime_context().get_node_id()
    available = available_resources_per_node()
    return [
        Node(
            address=node["NodeManagerAddress"],
            is_here=node["NodeID"] == here,
            total=_resources(node["Resources"]),
            available=_resources(available.get(node["NodeID"], {})),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def _resources(named: Mapping[str, float]) -> Resources:
    return Resources(cpus=named.get("CPU", 0.0), gpus=named.get("GPU", 0.0))


class _Host:
    """The placement group, an actor in each bundle, and the calls to them."""

    def __init__(self, order: Mapping[str, Any], asked: Sequence[Resources], answers: BinaryIO) -> None:
        self._order = order
        self._asked = asked
        self._answers = answers
        self._group: Any = None
        self._actors: dict[int, Any] = {}
        self._running: set[asyncio.Task[None]] = set()

    async def run(self, calls: BinaryIO) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), calls)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, reader.feed_eof)
        self._start(self._reserve())
        while line := await reader.readline():
            call = json.loads(line)
            self._start(self._call(call["id"], call["engine"], call["method"], call["arguments"]))
        for task in self._running:
            task.cancel()
        stopping = [asyncio.ensure_future(actor.stop.remote()) for actor in self._actors.values()]
        if stopping:
            await asyncio.wait(stopping, timeout=_STOP_S)

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _reserve(self) -> None:
        import ray

        timeout_s = self._order["settings"]["placement_timeout_s"]
        address = next(node.address for node in _nodes() if node.is_here)
        bundles = []
        for bundle in self._asked:
            asked = {"CPU": bundle.cpus, "GPU": bundle.gpus, f"node:{address}": _PINNED}
            bundles.append({name: amount for name, amount in asked.items() if amount})
        try:
            self._group = ray.util.placement_group(bundles, strategy="PACK")
            ready = asyncio.ensure_future(self._group.ready())
            await asyncio.wait((ready,), timeout=timeout_s)
            if not ready.done():
                raise PlacementRefused(refusal(self._asked, _nodes(), waited_s=timeout_s))
            ready.result()
        except Exception as error:  # noqa: BLE001 - told to the rollouter, which ends this process
            _answer(self._answers, 0, error=_words(error))
            return
        _answer(self._answers, 0, value={"address": address, "ray": ray.__version__})

    async def _call(self, number: int, engine: int, method: str, arguments: Sequence[Any]) -> None:
        import ray

        try:
            if engine not in self._actors:
                if method != "launch":
                    raise PlacementRefused("its Ray actor has ended")
                self._actors[engine] = self._actor(engine)
            value = await getattr(self._actors[engine], method).remote(*arguments)
        except ray.exceptions.RayActorError as error:
            self._actors.pop(engine, None)
            reason = _words(error).partition(" Some common causes")[0]  # Ray goes on with general advice
            _answer(self._answers, number, error=f"its Ray actor has ended: {reason}")
        except Exception as error:  # noqa: BLE001 - told to whoever called
            _answer(self._answers, number, error=_words(error))
        else:
            _answer(self._answers, number, value=value)

    def _actor(self, engine: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        asked = self._asked[engine]
        actor = ray.remote(RayEngine).options(
            num_cpus=asked.cpus,
            num_gpus=asked.gpus,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=engine),
        )
        server = self._order["servers"][engine]
        return actor.remote(
            server["name"],
            self._order["settings"],
            server["socket"],
            server["log_file"],
            server["cores"],
            str(Path.cwd()),
            on_gpu=asked.gpus > 0,
        )


def _answer(answers: BinaryIO, number: int, **answer: Any) -> None:
    try:
        answers.write(json.dumps({"id": number, **answer}).encode() + b"\n")
    except BrokenPipeError:
        pass  # the rollouter has ended, and so does standard input


def _words(error: BaseException) -> str:
    cause = getattr(error, "cause", None)
    text = " ".join(str(cause if isinstance(cause, BaseException) else error).split())
    return text[:2000] or type(error).__name__


if __name__ == "__main__":
    sys.argv[0] = str(Path(__file__).resolve().parent.parent / "ray_host")  # Ray's workers import from its directory
    main()
