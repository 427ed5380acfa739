"""Run by a new environment's interpreter: imports what the daemons import, once, so that their first start is quick.

It proves that the packages load on this machine and leaves their compiled bytecode behind (which a later start may be
forbidden to write). Only the first group must load; the rest depends on the platform and is merely prepared.
"""

import contextlib
import importlib
import sys

MUST_LOAD = ("numpy", "torch", "transformers", "vllm", "ray", "zmq", "redis", "msgpack", "orjson", "pydantic", "structlog")
PREPARED = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen3",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.modeling_gguf_pytorch_utils",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "megatron.core.models.gpt",
    "wandb",
    "tensorboard.summary.writer.event_file_writer",
    "rich.live",
    "pytest",
)


def main() -> None:
    for module in MUST_LOAD:
        sys.stdout.write(f"Preparing {module}\n")
        importlib.import_module(module)
    for module in PREPARED:
        sys.stdout.write(f"Preparing {module}\n")
        with contextlib.suppress(Exception):
            importlib.import_module(module)


main()
