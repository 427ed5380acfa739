"""Engines under a real Ray: what it cannot give is refused with the numbers; however we end, nothing of it stays."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from configs.gpu import GpuShares
from configs.schema import EngineSettings
from rollouter.engine_errors import EngineStartError
from rollouter.placement import ray_environment
from rollouter.ray_server import RayDriver, RayServer
from tests.fakes.living import is_alive

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 120.0

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]


def driver_in(directory: Path, **changes: object) -> RayDriver:
    settings = EngineSettings.model_validate({"placement": "ray", **changes})
    return RayDriver(settings, gpus=None, log_file=directory / "ray.log")


async def test_what_a_ray_of_two_cpus_cannot_give_is_refused_at_once(tmp_path: Path) -> None:
    """B122: 1 GPU and 60 CPUs of a Ray with 2 CPUs and no GPU; asked and available are named, nobody waits, nothing stays."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:2])
    try:
        driver = driver_in(tmp_path, num_gpus_per_engine=1, num_cpus_per_engine=60, placement_timeout_s=WAIT_S)
        cpus = len(os.sched_getaffinity(0))
        with pytest.raises(EngineStartError) as refused:
            await driver.ready()
    finally:
        os.sched_setaffinity(0, before)
    assert str(refused.value) == (
        "engine.placement=ray: 1 engine of 60 CPUs and 1 GPU each can never be placed on this host: "
        f"asked for 60 CPUs in all, {cpus} there; asked for 1 GPU in all, 0 there "
        f"[node 127.0.0.1 (this host): CPU {cpus} of {cpus}, GPU 0 of 0 available]"
    )
    await driver.close()
    assert_nothing_of_ray_is_left()


CLUSTER = """
    import sys, ray
    ray.init(address="local", num_cpus=2, num_gpus=2, include_dashboard=False, object_store_memory=80 << 20,
             _node_ip_address="127.0.0.1", _temp_dir=sys.argv[1], log_to_driver=False)
    group = ray.util.placement_group([{"CPU": 2}])
    ray.get(group.ready())
    print("gcs", ray.get_runtime_context().gcs_address, flush=True)
    if sys.stdin.readline():
        ray.util.remove_placement_group(group)
        print("freed", flush=True)
    sys.stdin.read()
    ray.shutdown()
"""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A Ray of someone else's with 2 CPUs, both held by another job until `free`, and 2 GPUs by name; its address."""
    environment = ray_environment(os.environ, address=None, token="0" * 64, gpus=None) | {"CUDA_VISIBLE_DEVICES": "7,4"}
    for name in ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, environment[name])
    with tempfile.TemporaryDirectory(prefix="hr-test-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(CLUSTER), directory],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            address = next(line.split()[1] for line in process.stdout if line.startswith("gcs "))
            yield address, process
        finally:
            process.communicate(timeout=WAIT_S)


@pytest.mark.slow
async def test_what_another_job_holds_is_waited_for_until_the_deadline_and_taken_once_free(
    tmp_path: Path, cluster: tuple[str, subprocess.Popen[str]]
) -> None:
    """B122: a joined cluster of 2 CPUs, first all taken, then free; a place is never waited for without end."""
    address, process = cluster
    driver = driver_in(tmp_path, ray_address=address, placement_timeout_s=2.0)
    with pytest.raises(EngineStartError) as refused:
        await driver.ready()
    assert "got no place on this host within engine.placement_timeout_s=2 s: asked for 1 CPU in all, 0 free" in str(
        refused.value
    )
    assert "node 127.0.0.1 (this host): CPU 0 of 2, GPU 2 of 2 available" in str(refused.value)
    with pytest.raises(EngineStartError, match=r"asked for 60 CPUs in all, 2 there"):
        await driver_in(tmp_path, ray_address=address, num_cpus_per_engine=60).ready()
    free(process)
    driver = driver_in(tmp_path, ray_address=address, num_cpus_per_engine=2)
    await driver.ready()
    await driver.close()
    assert process.poll() is None, "a Ray that is not ours must stay"


@pytest.mark.slow
async def test_engines_get_the_gpus_that_ray_assigned_and_never_the_trainers(
    tmp_path: Path, cluster: tuple[str, subprocess.Popen[str]]
) -> None:
    """B178: names as the cluster knows them, disjoint, in each server's environment; an overlap is refused at start."""
    address, process = cluster
    free(process)
    settings = EngineSettings(placement="ray", ray_address=address, num_engines=2)
    for trainer in ("5", "4"):
        shares = GpuShares(engines=("7", "4"), trainer=trainer, shared=False)
        driver = RayDriver(settings, gpus=shares, log_file=tmp_path / "ray.log")
        first, second = (
            RayServer(name, driver, socket=tmp_path / name, log_file=tmp_path / f"{name}.log", cores=None) for name in "ab"
        )
        await first.launch()
        if trainer == "5":
            await second.launch()
            assert [psutil.Process(server.pid).environ()["CUDA_VISIBLE_DEVICES"] for server in (first, second)] == ["7", "4"]
        else:
            with pytest.raises(EngineStartError, match=r"b: Ray assigned GPU 4, which is the trainer's"):
                await second.launch()
        await driver.close()


def free(process: subprocess.Popen[str]) -> None:
    """Have the other job give up its place."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("free\n")
    process.stdin.flush()
    assert process.stdout.readline() == "freed\n"


POOL = """
    import asyncio, json, sys
    from pathlib import Path
    from configs.schema import EngineSettings, WeightSyncSettings
    from rollouter.engine_pool import EnginePool

    async def main():
        directory = Path(sys.argv[1])
        settings = EngineSettings(placement="ray", max_model_len=64, kv_cache_bytes=64 << 20)
        pool = EnginePool(
            settings, WeightSyncSettings(), socket_dir=directory, log_dir=directory, partial_rollout=lambda: "keep"
        )
        await pool.launch()
        print(json.dumps([pool._ray.pid, pool._members[0].server.pid]), flush=True)
        await asyncio.sleep(600)

    asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rollouter", "driver"])
async def test_nothing_listens_outside_and_nothing_outlives_a_kill(victim: str, tmp_path: Path) -> None:
    """B122 flavour: kill -9 of the process that has the pool, or of Ray's driver: engine, Ray and sockets are gone soon."""
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(POOL), str(tmp_path),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        assert owner.stdout is not None
        async with asyncio.timeout(WAIT_S):
            while not (line := await owner.stdout.readline()).startswith(b"["):
                assert line, (tmp_path / "ray.log").read_text()
        driver, engine = json.loads(line)
        tree = [psutil.Process(driver), *psutil.Process(driver).children(recursive=True)]
        assert engine in [process.pid for process in tree]
        assert psutil.Process(engine).nice() == os.getpriority(os.PRIO_PROCESS, 0)
        listening = {
            connection.laddr.ip
            for process in tree
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        assert listening <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
        os.kill(owner.pid if victim == "rollouter" else driver, signal.SIGKILL)
        _, alive = await asyncio.to_thread(psutil.wait_procs, tree, 60)
        assert not [process for process in alive if is_alive(process)]
    finally:
        if owner.returncode is None:
            owner.kill()
        await owner.wait()
    assert_nothing_of_ray_is_left()


def assert_nothing_of_ray_is_left() -> None:
    """No process of our own Ray, and no directory of its sockets."""
    words = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert not [line for line in words if "hr-ray-" in line or "rollouter.ray_host" in line]
    assert not list(Path("/tmp").glob("hr-ray-*"))
