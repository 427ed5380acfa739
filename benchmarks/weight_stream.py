"""What it costs to publish a model's weights and stream them to an engine on the same host, beside a plain copy.

`python -m benchmarks.weight_stream [--quick] [--json]`. A trainer's float32 weights (the shapes of a 135 M parameter model,
270 MB in bfloat16) are published and received by a process of its own, several times; the best of the repetitions is shown,
and the same bytes are copied within this process in the same run. GB are 10^9 bytes of the bfloat16 model.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import tempfile
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import structlog
import torch

from configs.schema import WeightSyncSettings
from weight_sync import StageFailure, StageReport, WeightServer
from weight_sync.staging import StagingArea

LAYERS, HIDDEN, INTERMEDIATE, KEY_VALUE, VOCABULARY = 30, 576, 1536, 192, 49_152
WAIT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Best of `repetitions`."""

    model_bytes: int
    num_tensors: int
    bucket_bytes: int
    repetitions: int
    memcpy_gb_per_s: float
    """One thread, both buffers faulted in."""
    publish_s: float
    """Cast from float32, copy and checksum; the trainer waits for this."""
    publish_gb_per_s: float
    stream_s: float
    """From the engine's request until it has verified everything; the trainer does not wait for this."""
    stream_gb_per_s: float
    publish_share_of_memcpy: float
    stream_share_of_memcpy: float
    memcpy_cpu_s: float
    """Processor time of a plain copy of the model; this and the next three hardly depend on what else the machine does."""
    publish_cpu_s: float
    sender_cpu_s: float
    """Of the trainer's process for one transfer, `publish` not counted."""
    receiver_cpu_s: float
    """Of the engine's process for one transfer."""


def model_weights(layers: int) -> dict[str, torch.Tensor]:
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{prefix}self_attn.k_proj.weight": (KEY_VALUE, HIDDEN),
            f"{prefix}self_attn.v_proj.weight": (KEY_VALUE, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{prefix}mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{prefix}mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{prefix}mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
            f"{prefix}input_layernorm.weight": (HIDDEN,),
            f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
        }
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def receive(pipe: Connection) -> None:
    """The engine's process: stage each (address, version) that is asked for; answer with the processor time it took."""
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    area = StagingArea(check_manifest=lambda manifest: None)
    while (task := pipe.recv()) is not None:
        address, version, digest = task
        started = time.process_time()
        area.stage(address, version, engine="benchmark", nonce=f"v{version}", timeout_s=WAIT_S)
        while area.status()["state"] == "staging":
            time.sleep(0.001)
        area.mark_loaded(area.get(version, digest))
        pipe.send(time.process_time() - started)


def time_copy(num_bytes: int, repetitions: int) -> tuple[float, float]:
    """Least wall and least processor seconds of one thread copying between two buffers that are there."""
    source, destination = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    wall, cpu = [], []
    for _ in range(max(3, repetitions)):
        started, cpu_started = time.perf_counter(), time.thread_time()
        np.copyto(destination, source)
        wall.append(time.perf_counter() - started)
        cpu.append(time.thread_time() - cpu_started)
    return min(wall), min(cpu)


def measure(*, layers: int, repetitions: int, bucket_bytes: int, directory: Path) -> Figures:
    weights = model_weights(layers)
    staged: queue.Queue[StageReport | StageFailure] = queue.Queue()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive, args=(theirs,), daemon=True)
    process.start()
    publish_s, stream_s, publish_cpu_s, sender_cpu_s, receiver_cpu_s = [], [], [], [], []
    server = WeightServer(
        WeightSyncSettings(bucket_bytes=bucket_bytes),
        socket_dir=directory,
        dtype=torch.bfloat16,
        on_staged=staged.put,
        on_failed=staged.put,
    )
    with server:
        for version in range(repetitions + 2):
            weights["model.norm.weight"] += 1
            cpu_started = time.process_time()
            publication = server.publish(weights.items(), policy_version=version)
            cpu_published = time.process_time()
            ours.send((server.address, version, publication.manifest_digest))
            report = staged.get(timeout=WAIT_S)
            if isinstance(report, StageFailure):
                raise RuntimeError(report.reason)
            receiver_cpu = ours.recv()
            if version >= 2:  # the first two fault the memory in
                publish_s.append(publication.seconds)
                stream_s.append(report.seconds)
                publish_cpu_s.append(cpu_published - cpu_started)
                sender_cpu_s.append(time.process_time() - cpu_published)
                receiver_cpu_s.append(receiver_cpu)
    ours.send(None)
    process.join(WAIT_S)
    gigabytes = publication.total_bytes / 1e9
    memcpy_s, memcpy_cpu_s = time_copy(publication.total_bytes, repetitions)
    return Figures(
        model_bytes=publication.total_bytes,
        num_tensors=publication.num_tensors,
        bucket_bytes=bucket_bytes,
        repetitions=repetitions,
        memcpy_gb_per_s=gigabytes / memcpy_s,
        publish_s=min(publish_s),
        publish_gb_per_s=gigabytes / min(publish_s),
        stream_s=min(stream_s),
        stream_gb_per_s=gigabytes / min(stream_s),
        publish_share_of_memcpy=memcpy_s / min(publish_s),
        stream_share_of_memcpy=memcpy_s / min(stream_s),
        memcpy_cpu_s=memcpy_cpu_s,
        publish_cpu_s=min(publish_cpu_s),
        sender_cpu_s=min(sender_cpu_s),
        receiver_cpu_s=min(receiver_cpu_s),
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weight_stream", description="Speed of the weight stream.")
    parser.add_argument("--quick", action="store_true", help="a model of 4 layers and 3 repetitions")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--bucket-bytes", type=int, default=WeightSyncSettings().bucket_bytes, help="size of a bucket")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    with tempfile.TemporaryDirectory(prefix="headrace-") as directory:
        figures = measure(
            layers=4 if options.quick else LAYERS,
            repetitions=3 if options.quick else 10,
            bucket_bytes=options.bucket_bytes,
            directory=Path(directory),
        )
    print(f"model      {figures.model_bytes / 1e6:8.1f} MB in bfloat16, {figures.num_tensors} tensors")
    print(f"memcpy     {figures.memcpy_gb_per_s:8.2f} GB/s, {figures.memcpy_cpu_s * 1e3:.0f} ms CPU")
    print(
        f"publish    {figures.publish_gb_per_s:8.2f} GB/s, {figures.publish_s * 1e3:.0f} ms, "
        f"{figures.publish_cpu_s * 1e3:.0f} ms CPU"
    )
    print(
        f"stream     {figures.stream_gb_per_s:8.2f} GB/s, {figures.stream_s * 1e3:.0f} ms, "
        f"{figures.sender_cpu_s * 1e3:.0f} + {figures.receiver_cpu_s * 1e3:.0f} ms CPU"
    )
    if options.json:
        print(json.dumps(asdict(figures)))


if __name__ == "__main__":
    main()
