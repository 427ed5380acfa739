"""Every setting of Headrace: its name, type, default, range and meaning.

Invariant: a `Settings` object is valid as a whole. It is frozen; a live change makes a new one (`configs.live`).
A component is handed its section, never the tree. Fields made with `live()` may change while the run goes on and are read
at the moment of decision; their scope says from when a change holds.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from configs.bus_address import is_loopback, problem_of, problem_of_transport, tcp_insecurity

MAX_ENGINE_LORA_RANK = 512
"""Of vLLM."""


class Section(BaseModel):
    """A frozen group of settings that refuses unknown keys, NaN and infinities."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)


class Scope(StrEnum):
    """From when a live change holds."""

    NEXT_ADMISSION = "next admission"
    NEXT_STEP = "next step"
    NEXT_SYNC = "next sync"
    NEXT_ROLLOUT = "next rollout"
    AT_ONCE = "at once"


def live(default: Any, scope: Scope, *, description: str, **bounds: Any) -> Any:
    """Declare a field that may change on a running job, from `scope` on."""
    return Field(default, description=description, json_schema_extra={"live": scope.value}, **bounds)


class ModelSettings(Section):
    source: str = Field(
        "smollm2-135m-instruct",
        description="What is trained: `smollm2-135m-instruct` (taken from its package), `tiny-sort` (made and warm-started "
        "here), a Hugging Face directory, or a hub name.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Compute type of trainer and engine; masters stay float32. `auto`: bfloat16 where the processor has it.",
    )
    cache_dir: Path | None = Field(None, description="Where converted models are kept. Default: the user's cache directory.")
    warm_start_steps: int = Field(200, ge=0, description="Supervised steps for a model that is made here (`tiny-sort`).")
    trust_remote_code: bool = Field(False, description="Run code that a hub model brings along.")


class DataSettings(Section):
    source: str | tuple[str, ...] = Field(
        "addition",
        description="Tasks, from one source or several: `addition`, `sort`, `reasoning_gym:NAME` (with `?key=value&…` of its "
        "configuration), a file (.jsonl, .json, .parquet, .arrow), a directory saved by Hugging Face datasets, or a dotted "
        "path `module:function` returning rows.",
    )
    weights: tuple[float, ...] = Field(
        (), description="With several sources, how often each row of each comes in an epoch; empty: once."
    )
    reward: str = Field(
        "agent_loop.rewards:exact_match",
        description="Reward: dotted path to a function of (data_source, solution_str, ground_truth, extra_info).",
    )
    prompt_key: str | None = Field(
        None, min_length=1, description="Column of the prompt; null: the first of prompt, messages, question, problem."
    )
    ground_truth_key: str | None = Field(
        None,
        min_length=1,
        description="Column of the ground truth, dots lead into it; null: the first of ground_truth, "
        "reward_model.ground_truth, answer, solution.",
    )
    data_source_key: str = Field("data_source", min_length=1, description="Column of the data source's name.")
    needs_ground_truth: bool = Field(True, description="Whether a row without ground truth is an error.")
    as_chat: bool = Field(False, description="A prompt given as text becomes a user's message of the model's chat template.")
    system_prompt: str = Field("", description="System message put before chat messages that have none.")
    held_out_fraction: float = Field(0.2, ge=0.0, lt=1.0, description="Share of the tasks kept for evaluation, never trained.")
    shuffle: bool = Field(True, description="Shuffle each epoch by the run's seed.")
    curriculum: str | None = Field(
        None, min_length=1, description="Dotted path to a function of (tasks, epoch, seed) returning an epoch's order."
    )
    num_epochs: int | None = Field(None, ge=1, description="Passes over the tasks; null: as many as the steps need.")
    max_prompt_tokens: int = Field(1024, ge=1, description="Tasks with a longer prompt are refused.")
    on_overlong: Literal["drop", "left", "right", "error"] = Field(
        "drop",
        description="A prompt beyond max_prompt_tokens: leave the task out, cut the prompt's beginning (left) or end (right), "
        "or refuse the data.",
    )
    filter: Literal["auto", "at_start", "lazy"] = Field(
        "auto",
        description="When prompts are measured: all at the start (in parallel, the result is kept), or each as its turn comes; "
        "`auto`: at the start up to 20000 rows.",
    )
    filter_processes: int | None = Field(None, ge=1, le=1024, description="Processes that measure; null: as many as cores.")
    cache_dir: Path | None = Field(
        None, description="Where converted files and measured lengths are kept. Default: the user's cache directory."
    )

    @field_validator("weights")
    @classmethod
    def _positive(cls, weights: tuple[float, ...]) -> tuple[float, ...]:
        if any(not 0 < weight <= 1000 for weight in weights):
            raise ValueError(f"got {list(weights)}, expected numbers above 0, at most 1000")
        return weights

    @property
    def sources(self) -> tuple[str, ...]:
        """Every source, one or several."""
        return (self.source,) if isinstance(self.source, str) else self.source


class FilterSettings(Section):
    zero_signal: Literal["keep", "drop"] = live(
        "keep",
        Scope.NEXT_STEP,
        description="Groups whose rewards are all alike: train them, or drop them and have as many new ones made (DAPO).",
    )
    max_attempts: int = live(
        10,
        Scope.NEXT_STEP,
        ge=1,
        le=1_000_000,
        description="With zero_signal=drop: groups of so many steps may be dropped for one step; what comes after is kept.",
    )
    pass_reward: float = live(
        1.0, Scope.NEXT_ADMISSION, ge=-1e9, le=1e9, description="A sample with at least this reward counts as passed."
    )
    min_pass_rate: float = live(
        0.0,
        Scope.NEXT_ADMISSION,
        ge=0,
        le=1,
        description="A task whose last group passed less often than this is passed over, for revisit_epochs.",
    )
    max_pass_rate: float = live(
        1.0, Scope.NEXT_ADMISSION, ge=0, le=1, description="A task whose last group passed more often than this is passed over."
    )
    revisit_epochs: int = live(
        3, Scope.NEXT_ADMISSION, ge=2, le=1_000_000, description="Epochs after which a task that was passed over comes again."
    )
    replay_share: float = live(
        0.0,
        Scope.NEXT_ADMISSION,
        ge=0,
        le=0.9,
        description="Share of the groups that are made of tasks seen before, those of medium pass rate first; 0: none.",
    )


class RewardPart(BaseModel):
    """One summand of a weighted sum."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    function: str = Field(description="Path as in data.reward.")
    weight: float = Field(1.0, description="Factor in the sum; 0: only logged.")
    arguments: dict[str, Any] = Field({}, description="Given to the function by keyword.")


class RewardSettings(Section):
    """How rewards are computed; which one is data.reward."""

    arguments: dict[str, Any] = Field({}, description="Given to data.reward by keyword, such as a judge's `url`.")
    parts: dict[str, RewardPart] = Field(
        {},
        description="A weighted sum in place of data.reward: name to `{function, weight, arguments}`; each part is logged.",
    )
    num_processes: int = Field(2, ge=1, le=1024, description="Processes in which blocking and batched rewards run.")
    num_async_processes: int = Field(
        1, ge=1, le=1024, description="Processes in which async rewards run, many at once in each."
    )
    max_concurrent: int = Field(64, ge=1, le=100_000, description="Calls of async rewards at once in one process.")
    max_batch: int = Field(32, ge=1, le=100_000, description="Replies that a batched reward is given at once at most.")
    batch_wait_s: float = Field(0.05, ge=0, le=3600, description="How long a batch waits for more replies.")
    timeout_s: float = Field(
        30.0, gt=0, le=1e6, description="Deadline of one call; its process is then killed, with all that it started."
    )
    start_timeout_s: float = Field(120.0, gt=0, le=1e6, description="Deadline for a reward process to load its functions.")
    max_memory_bytes: int | None = Field(
        8 << 30, ge=64 << 20, description="Address space of one reward process; null: no limit (needed for CUDA)."
    )
    max_attempts: int = Field(
        4, ge=1, le=1000, description="Times that a score is asked for when the reward's infrastructure fails."
    )
    retry_delay_s: float = Field(0.5, ge=0, le=3600, description="Wait before the second time; doubles with each further one.")
    overlong_buffer_tokens: int = live(
        0,
        Scope.AT_ONCE,
        ge=0,
        le=1_000_000_000,
        description="Soft overlong punishment (DAPO, eq. 13): tokens before overlong_max_tokens over which it grows; 0: none.",
    )
    overlong_penalty: float = live(
        1.0, Scope.AT_ONCE, ge=0, le=1e6, description="Factor of that punishment, which is -1 at overlong_max_tokens."
    )
    overlong_max_tokens: int | None = live(
        None,
        Scope.AT_ONCE,
        ge=1,
        le=1_000_000_000,
        description="Sampled tokens at which a rollout is overlong, also for length_penalty; null: sampling.max_tokens.",
    )
    length_penalty: float = live(
        0.0, Scope.AT_ONCE, ge=0, le=1e6, description="Subtracted at overlong_max_tokens, and less in proportion before."
    )


class BusSettings(Section):
    transport: Literal["zmq", "redis"] = Field(
        "zmq", description="How samples and control messages travel: sockets and a spool on disk, or a Redis server."
    )
    address: str = Field(
        "auto",
        description="Where the trainer listens: `auto` (a socket of this run on this host), `ipc://PATH` or `tcp://HOST:PORT`; "
        "or the Redis server: `redis://HOST:PORT/DB`, `rediss://…` (TLS) or `unix://PATH`; `auto` is redis://127.0.0.1:6379/0.",
    )
    keys_dir: Path | None = Field(
        None, description="CURVE keys made by `headrace keys new DIR`; with them tcp:// is encrypted and authenticated."
    )
    allow_insecure: bool = Field(
        False, description="Allow a bus beyond this host without keys (zmq) or without password and TLS (redis)."
    )
    redis_username: str | None = Field(None, description="ACL user at the Redis server.")
    redis_password_file: Path | None = Field(None, description="File that holds the Redis password; never in the address.")
    redis_ca_file: Path | None = Field(None, description="Certificate authority of a rediss:// server; null: the system's.")
    redis_cert_file: Path | None = Field(None, description="Client certificate for a rediss:// server.")
    redis_key_file: Path | None = Field(None, description="Key of that certificate.")
    redis_allow_volatile: bool = Field(
        False, description="Go on, with a warning, when the Redis server's settings cannot keep samples over its own death."
    )
    spool_sync: bool = Field(
        False, description="Put each record of the spool on the disk itself (survives a power cut, not only a process)."
    )
    retain: bool = Field(False, description="Keep every sample in RUN_DIR/retained, for `trainer --replay RUN_DIR`.")
    max_queued_samples: int = Field(
        512, ge=1, description="Samples on the bus and in the trainer's intake; beyond it offers wait."
    )
    max_queued_bytes: int = Field(256 << 20, ge=1 << 16, description="Bytes of such samples.")
    max_sample_bytes: int = Field(64 << 20, ge=1 << 10, description="A larger sample is refused at the producer.")
    heartbeat_interval_s: float = Field(1.0, gt=0, description="How often each daemon says what it is doing.")
    heartbeat_timeout_s: float = Field(20.0, gt=0, description="Silence after which a daemon counts as lost.")
    connect_timeout_s: float = Field(
        600.0, gt=0, description="How long a daemon waits for the other one at start or after a loss."
    )
    request_timeout_s: float = Field(10.0, gt=0, description="Deadline of one control request.")
    on_lost: Literal["wait", "fail"] = live(
        "fail", Scope.AT_ONCE, description="When the other daemon is lost: wait for it, or end with an error."
    )

    @field_validator("address")
    @classmethod
    def _usable(cls, address: str) -> str:
        problem = problem_of(address)
        if problem is not None:
            raise ValueError(problem)
        return address


class WeightSyncSettings(Section):
    transport: Literal["shared_memory", "tcp", "collective", "file"] = Field(
        "shared_memory",
        description="How weights leave the trainer: `shared_memory` within one host, `tcp` and `collective` across hosts, "
        "`file` through a directory.",
    )
    bucket_bytes: int = Field(
        4 << 20, ge=1 << 12, le=1 << 30, description="Size of one of the two buckets that stream the weights."
    )
    directory: Path | None = Field(
        None,
        description="Where the transport `file` writes each version; null: beside the sockets of the run. With listen_host "
        "beyond loopback it has to be mounted at the same path on all hosts.",
    )
    verify: Literal["always", "first", "never"] = Field(
        "always",
        description="When receivers compute checksums of what arrived, and engines read a sample of what they loaded back from "
        "their model: with each version, with the first one only, or never.",
    )
    snapshot: Literal["auto", "always", "never"] = Field(
        "auto",
        description="`always`: each version is copied, and training goes on at once. `never`: it is sent from the live weights "
        "through two buckets, and the next optimizer step waits until the receivers have it, or for stage_timeout_s. `auto`: a "
        "copy wherever 1.2 times its memory is available.",
    )
    encoding: Literal["auto", "full", "delta"] = Field(
        "auto",
        description="`full`: all of the weights travel each time. `delta`: only what changed since the version that the "
        "receiver holds, bit by bit, where that is smaller. `auto`: `delta` over tcp and collective, `full` within a host.",
    )
    lora: Literal["merged", "adapter"] = Field(
        "merged",
        description="With trainer.lora_rank, what engines are given: `merged`, the whole weights with the adapters added; "
        "`adapter`, the adapters alone, which the engines apply beside the weights that they started with.",
    )
    probe: Literal["off", "on"] = Field(
        "off",
        description="`on`: after each round an engine scores a fixed sequence, and its logprobs are compared with those of the "
        "trainer's forward pass at the same version.",
    )
    listen_host: str = Field(
        "127.0.0.1",
        pattern=r"^[A-Za-z0-9._:%\[\]-]+$",
        description="Where the trainer listens for `tcp` and `collective`, and for `file` with a directory. Beyond loopback "
        "tcp is encrypted, and collective, which cannot be, needs bus.allow_insecure.",
    )
    listen_port: int = Field(0, ge=0, le=65535, description="Port of `tcp` and `collective`; 0: any that is free.")
    advertised_host: str | None = Field(
        None,
        description="Host by which engines reach the trainer; null: listen_host, or what leads here where that is a wildcard.",
    )
    num_connections: int = Field(2, ge=1, le=16, description="Connections over which `tcp` spreads one transfer.")
    switch: Literal["together", "rolling"] = live(
        "together",
        Scope.NEXT_SYNC,
        description="`together`: all engines load a version at once. `rolling`: one after another, so that generation never "
        "stops everywhere; for as long as that takes, engines of one rollouter serve two versions.",
    )
    host_cache: bool = Field(
        True,
        description="Let a process of the rollouter stage each version once and lend it to all engines of this host; engines "
        "that start again get it there, without the trainer.",
    )
    name_map: str | None = Field(
        None, description="Dotted path `module:function` from the trainer's name of a tensor to the engine's; null: the same."
    )
    connect_timeout_s: float = Field(30.0, gt=0, description="Deadline for an engine to open the stream of a round.")
    bucket_timeout_s: float = Field(30.0, gt=0, description="Deadline for one bucket to be taken.")
    announce_timeout_s: float = Field(30.0, gt=0, description="Deadline for an announced version to be asked for.")
    stage_timeout_s: float = Field(120.0, gt=0, description="Deadline for a version to be staged once it was asked for.")
    commit_timeout_s: float = Field(
        60.0, gt=0, description="Deadline for an engine to switch to a staged version, from its pause until it has said so."
    )
    confirm_timeout_s: float = Field(30.0, gt=0, description="Deadline for an engine to say which version it holds.")
    round_timeout_s: float = Field(120.0, gt=0, description="Deadline of a whole round: announce, stage, commit, confirm.")


class EngineSettings(Section):
    num_engines: int = Field(1, ge=1, description="Inference servers started and supervised here.")
    urls: tuple[str, ...] = Field((), description="Servers that run already; when given, none is started.")
    max_model_len: int = Field(2048, ge=8, description="Longest sequence in tokens.")
    max_num_seqs: int = Field(128, ge=1, description="Sequences that an engine decodes together.")
    kv_cache_bytes: int = Field(512 << 20, ge=1 << 20, description="Memory of the KV cache on CPU, in bytes.")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="Share of a GPU's memory that an engine takes.")
    max_requests: int | None = live(
        None,
        Scope.AT_ONCE,
        ge=1,
        le=1_000_000,
        description="Requests that an engine is given at once at most; null: engine.max_num_seqs.",
    )
    adaptive_requests: bool = live(
        False,
        Scope.AT_ONCE,
        description="Find each engine's number of requests from its queue and the use of its KV cache, up to max_requests.",
    )
    pressure_interval_s: float = live(
        1.0, Scope.AT_ONCE, gt=0, le=3600, description="Seconds between two looks at an engine's queue and KV cache."
    )
    start_timeout_s: float = Field(600.0, gt=0, description="Deadline for an engine to answer after it was started.")
    request_timeout_s: float = Field(300.0, gt=0, description="Deadline of one generation.")
    max_restarts: int = Field(3, ge=0, description="Times that an engine which died is started again.")
    extra_args: tuple[str, ...] = Field((), description="More arguments for the vLLM server's command line.")
    placement: Literal["local", "ray"] = Field(
        "local", description="Who starts the servers: this daemon, or a Ray actor each in a placement group on this host."
    )
    ray_address: str | None = Field(
        None,
        pattern=r"^(auto|[^\s:/]+:[0-9]{1,5})$",
        description="Ray cluster to join: `auto` or `HOST:PORT`; null: a Ray of this run's own, on loopback.",
    )
    num_cpus_per_engine: float = Field(1.0, ge=0, description="CPUs that Ray reserves for each engine.")
    num_gpus_per_engine: int | None = Field(
        None, ge=0, description="GPUs that Ray reserves for each engine; null: its share of the visible ones, 0 without any."
    )
    placement_timeout_s: float = Field(
        60.0, gt=0, description="Deadline for Ray to reserve what the engines ask for; what can never fit is refused at once."
    )


class AutoStalenessSettings(Section):
    enabled: bool = live(
        False,
        Scope.AT_ONCE,
        description="Let the trainer move staleness_threshold, by changes in the name of `auto`; staleness_threshold=auto is "
        "short for it. A change of staleness_threshold by anybody else turns it off.",
    )
    target_waiting_share: float = live(
        0.05,
        Scope.AT_ONCE,
        gt=0,
        lt=1,
        description="Share of its time that the trainer may wait for samples: above it "
        "staleness_threshold is raised, below half of it lowered.",
    )
    min_effective_sample_size: float = live(
        0.7,
        Scope.AT_ONCE,
        gt=0,
        lt=1,
        description="Floor of (sum w)^2 / (n sum w^2) of a step's importance weights: below it staleness_threshold is halved.",
    )
    min: float = live(0.0, Scope.AT_ONCE, ge=0, le=1e6, description="Lowest staleness_threshold that is set by itself.")
    max: float = live(4.0, Scope.AT_ONCE, ge=0, le=1e6, description="Highest one.")
    interval_steps: int = live(
        8, Scope.AT_ONCE, ge=1, le=1_000_000, description="Steps that are looked at before each decision."
    )


class SamplingSettings(Section):
    temperature: float = live(1.0, Scope.NEXT_ROLLOUT, gt=0, le=10, description="Sampling temperature of training rollouts.")
    max_tokens: int = live(64, Scope.NEXT_ROLLOUT, ge=1, le=1_000_000_000, description="New tokens of one turn at most.")
    stop: tuple[str, ...] = Field((), description="Strings, each one token of the model, at which a turn ends.")


class RollouterSettings(Section):
    agent_loop: str = Field(
        "agent_loop.single_turn:SingleTurn",
        description="Agent loop: `single_turn`, `tool_calling`, `environment`, `program`, or a dotted path `module:Class`; "
        "rows may name another one in `agent_name`.",
    )
    agent_loops: tuple[str, ...] = Field(
        (), description="More names for `agent_name`, each `NAME=module:Class`; a row may also give a dotted path itself."
    )
    environment: str | None = Field(
        None, description="With agent_loop=environment: dotted path `module:Class` to a class with `reset` and `step`."
    )
    max_concurrent_rollouts: int = live(
        256, Scope.NEXT_ADMISSION, ge=1, le=1_000_000, description="Rollouts in flight at most."
    )
    rollout_timeout_s: float = live(
        300.0, Scope.NEXT_ROLLOUT, gt=0, le=1e9, description="Deadline of one rollout, reward included."
    )
    max_attempts: int = live(3, Scope.AT_ONCE, ge=1, le=1000, description="Times that a rollout is tried before it is dropped.")
    max_consecutive_failures: int = Field(
        64, ge=1, description="Failed rollouts in a row after which the run stops, those of evaluations included."
    )
    max_failed_fraction: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Share of failed rollouts, among the last failure_window, above which the run stops; 1: never.",
    )
    failure_window: int = Field(256, ge=1, le=1_000_000, description="Rollouts over which max_failed_fraction is taken.")
    group_timeout_s: float | None = live(
        None,
        Scope.NEXT_ADMISSION,
        gt=0,
        le=1e9,
        description="Deadline of a group, from its admission: seats still open are then given up; null: none but "
        "rollout_timeout_s.",
    )
    max_requeues: int = live(
        3,
        Scope.NEXT_ADMISSION,
        ge=0,
        le=1000,
        description="With on_stale=retry: times that a task is issued again because its group was too old.",
    )
    progress_interval_s: float = live(
        1.0,
        Scope.NEXT_ROLLOUT,
        ge=0,
        le=3600,
        description="Seconds of generation after which a rollout's new tokens are recorded, so that a rollouter that comes "
        "again goes on from them: turns are asked for in slices of about that length; 0: whole turns.",
    )
    max_task_failures: int = Field(
        3, ge=1, description="Rollouts of one task given up by its own fault after which it is quarantined."
    )


class ToolSettings(Section):
    sources: tuple[str, ...] = Field(
        (),
        description="Tools: `python` (code in a limited process), `sandbox` (code at tools.sandbox_url), `module:name` (a "
        "function, a tool, or a list of them), `mcp:COMMAND …` or `mcp:http://…` (all tools of an MCP server).",
    )
    format: Literal["auto", "hermes", "llama3", "mistral", "deepseek", "pythonic"] = Field(
        "auto", description="How the model writes a call; `auto`: as its chat template does."
    )
    history: Literal["template", "append"] = Field(
        "template",
        description="Where the chat template writes earlier turns in another way than they were sampled: `template` follows it "
        "and begins a new segment; `append` leaves the history as it was sampled.",
    )
    max_turns: int = Field(8, ge=1, le=10_000, description="Turns of one rollout at most.")
    max_calls_per_turn: int = Field(8, ge=1, description="Calls of one turn that are executed; those beyond are refused.")
    max_calls: int = Field(64, ge=1, description="Calls of one rollout that are executed; those beyond are refused.")
    timeout_s: float = Field(30.0, gt=0, description="Deadline of one call.")
    start_timeout_s: float = Field(60.0, gt=0, description="Deadline for an MCP server to answer after it was started.")
    max_output_tokens: int = Field(1024, ge=1, description="Tokens of a call's output that the model is shown.")
    retries: int = Field(2, ge=0, description="Times that a call is made again when its tool says that it is unavailable.")
    max_concurrent: int = Field(64, ge=1, description="Calls of all rollouts that run at once.")
    python_memory_bytes: int = Field(1 << 30, ge=64 << 20, description="Memory of one process of the `python` tool.")
    sandbox_url: str | None = Field(None, description="Base URL of a code sandbox that speaks SandboxFusion's `/run_code`.")
    parse_error_alert: float = Field(
        0.5, gt=0, le=1, description="Share of malformed or unknown calls among the last 256 above which a warning is logged."
    )


class GatewaySettings(Section):
    command: tuple[str, ...] = Field(
        (),
        description="A program and its arguments: with agent_loop=program it is started for each rollout; with external it is "
        "started once and takes rollouts by POST /sessions (empty: programs that run elsewhere do).",
    )
    max_programs: int | None = Field(
        None,
        ge=1,
        le=65536,
        description="With agent_loop=program: programs that run at once, the rollouts beyond wait; null: 4 for each core, and "
        "8 at least.",
    )
    num_programs: int = Field(1, ge=1, le=1024, description="With agent_loop=external: copies of the program.")
    claim_wait_s: float = Field(
        20.0, ge=0, le=600, description="How long a program that asks for a rollout waits for one; then 429."
    )
    idle_timeout_s: float = Field(
        300.0, gt=0, description="With agent_loop=external: a rollout whose program makes no call for so long fails."
    )
    reward: Literal["function", "last_line", "posted"] = Field(
        "function",
        description="Where the reward comes from when the program posted none: the reward function, or the last line that the "
        "program prints (with agent_loop=program: a number, or JSON with `reward` and `parts`); `posted`: it has none.",
    )
    temperature: Literal["run", "refuse"] = Field(
        "run",
        description="A request that asks for another temperature than the run samples at: sampled at the run's, or refused.",
    )
    max_calls: int = Field(1000, ge=1, description="Calls of one rollout that are answered in all.")
    max_calls_per_session: int = Field(16, ge=1, description="Calls of one rollout that are answered at once; then 429.")
    host: str = Field("127.0.0.1", description="Where the gateway listens.")
    port: int = Field(0, ge=0, le=65535, description="0: any free port.")


class TrainerSettings(Section):
    policy: Literal["fsdp"] = Field("fsdp", description="How the model is trained.")
    learning_rate: float = live(1e-5, Scope.NEXT_STEP, ge=0, le=1, description="Peak learning rate of AdamW.")
    warmup_steps: int = live(
        3, Scope.NEXT_STEP, ge=0, le=1_000_000_000, description="Steps over which the learning rate rises linearly from 0."
    )
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay.")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's first moment decay.")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW's second moment decay.")
    max_grad_norm: float = live(
        1.0, Scope.NEXT_STEP, gt=0, le=1e9, description="Gradients are scaled down to this global norm."
    )
    proximal: Literal["step", "behavior"] = Field(
        "step",
        description="What the clipped ratio is taken against: the weights at the start of the step, with a capped importance "
        "weight for the samples' age (decoupled form), or the weights that sampled the token (PPO).",
    )
    clip_low: float = live(0.2, Scope.NEXT_STEP, gt=0, lt=1, description="Ratio's lower clip: 1 - clip_low.")
    clip_high: float = live(0.28, Scope.NEXT_STEP, gt=0, le=1e6, description="Ratio's upper clip: 1 + clip_high.")
    max_importance_weight: float = live(
        2.0, Scope.NEXT_STEP, ge=1, le=1e9, description="Cap of the importance weight from behavior to proximal policy."
    )
    normalize_by_std: bool = live(
        True, Scope.NEXT_STEP, description="Divide a group's advantages by its standard deviation (GRPO)."
    )
    dense_weight: float = live(
        1.0,
        Scope.NEXT_STEP,
        ge=0,
        le=1e6,
        description="Rewards of turns: this much of their advantages is added to that of the whole rollout; 0: none.",
    )
    dense_discount: float = live(
        1.0, Scope.NEXT_STEP, ge=0, le=1, description="Rewards of turns: what the next turn's count for a turn, per turn."
    )
    lora_rank: int = Field(
        0, ge=0, le=1024, description="Rank of the adapters that are trained in place of the model's weights; 0: train those."
    )
    lora_alpha: float = Field(32.0, gt=0, le=1e6, description="An adapter counts lora_alpha / lora_rank times.")
    lora_targets: tuple[str, ...] = Field(
        (), description="Linear layers that get an adapter, such as `q_proj`; empty: all but the language head."
    )
    max_tokens_per_microbatch: int = Field(4096, ge=16, description="Tokens of one packed forward and backward pass.")
    num_threads: int | None = Field(None, ge=1, description="Threads of the trainer; null: its share of the cores.")


class EvaluationSettings(Section):
    at_start: bool = Field(True, description="Measure the held-out accuracy of the first version.")
    at_end: bool = live(True, Scope.AT_ONCE, description="Measure the held-out accuracy of the last version.")
    every_versions: int = live(
        0, Scope.NEXT_SYNC, ge=0, le=1_000_000_000, description="Measure it each so many versions; 0: never in between."
    )
    samples_per_task: int = live(4, Scope.NEXT_SYNC, ge=1, le=10_000, description="Samples of each held-out task.")
    max_tasks: int = Field(64, ge=1, description="Held-out tasks at most.")
    temperature: float = live(1.0, Scope.NEXT_SYNC, ge=0, le=10, description="Sampling temperature of evaluation; 0 is greedy.")
    timeout_s: float = live(300.0, Scope.NEXT_SYNC, gt=0, le=1e9, description="Deadline of one evaluation.")


class CheckpointSettings(Section):
    every_steps: int = live(0, Scope.NEXT_STEP, ge=0, le=1_000_000_000, description="Save each so many steps; 0: never.")
    at_end: bool = live(False, Scope.AT_ONCE, description="Save after the last step.")
    keep: int = live(2, Scope.NEXT_STEP, ge=1, le=1_000_000, description="Complete checkpoints kept.")
    resume: Literal["never", "auto", "must"] = Field(
        "never", description="Start from the newest complete checkpoint: never, if there is one, or else fail."
    )


class TrackingSettings(Section):
    backends: tuple[Literal["jsonl", "tensorboard", "wandb"], ...] = Field(
        ("jsonl", "tensorboard"), description="Where metrics go. wandb is offline unless WANDB_API_KEY is set."
    )
    wandb_project: str = Field("headrace", description="Project name at wandb.")


class LoggingSettings(Section):
    level: Literal["debug", "info", "warning", "error"] = live(
        "info", Scope.AT_ONCE, description="Least severe level that is logged."
    )
    format: Literal["auto", "console", "json"] = Field(
        "auto", description="`auto`: console on a terminal, JSON lines otherwise."
    )


class Settings(Section):
    """The whole tree; depth 2."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="The run's name.")
    run_dir: Path = Field(Path("runs/run"), description="Where the run writes logs, metrics and checkpoints.")
    seed: int = Field(0, ge=0, lt=1 << 31, description="Seed of data order, sampling and initialization.")
    num_steps: int = Field(100, ge=1, description="Optimizer steps of the run.")
    group_size: int = Field(
        8, ge=2, description="Rollouts of one task; advantages are relative to siblings, so there are at least two."
    )
    samples_per_step: int = live(
        64, Scope.NEXT_STEP, ge=1, le=1_000_000_000, description="Samples of one optimizer step; a multiple of group_size."
    )
    staleness_threshold: float = live(
        0.5,
        Scope.NEXT_ADMISSION,
        ge=0,
        le=1e6,
        description="How far generation may run ahead, in sync periods: 0 is synchronous, 1 one period ahead; `auto` lets the "
        "trainer move it (auto_staleness).",
    )
    trigger_parameter_sync_step: int = live(
        1,
        Scope.NEXT_SYNC,
        ge=1,
        le=1_000_000_000,
        description="Optimizer steps between two published versions; the last step is always published.",
    )
    max_staleness: int | None = live(
        None, Scope.NEXT_STEP, ge=0, le=1_000_000_000, description="Hard bound on a sample's age in versions; null: none."
    )
    on_stale: Literal["drop", "retry", "downweight", "wait"] = live(
        "drop",
        Scope.NEXT_STEP,
        description="What happens to a group with a sample beyond max_staleness: drop it; drop it and issue its task again "
        "(up to rollouter.max_requeues times); train it with its old tokens' loss scaled down (stale_weight_base); or wait: "
        "the step before a version waits for rollouts that the version would make too old, and what is too old nevertheless "
        "is dropped.",
    )
    stale_weight_base: float = live(
        0.5,
        Scope.NEXT_STEP,
        gt=0,
        le=1,
        description="With on_stale=downweight a token's loss is multiplied by this for each version beyond max_staleness.",
    )
    on_failed_seat: Literal["train_survivors", "drop", "refill"] = live(
        "train_survivors",
        Scope.AT_ONCE,
        description="A group of which a rollout was given up: train the others if min_survivors are left, drop it, or fill the "
        "seat with a fresh rollout (up to rollouter.max_task_failures times, then as train_survivors).",
    )
    min_survivors: int = live(
        2, Scope.AT_ONCE, ge=2, le=1_000_000, description="Siblings that a group needs to be trained without the others."
    )
    partial_rollout: Literal["keep", "recompute", "finish"] = live(
        "keep",
        Scope.NEXT_SYNC,
        description="Requests in flight at a sync: go on with their KV cache, go on with it recomputed, or finish first.",
    )
    auto_staleness: AutoStalenessSettings = AutoStalenessSettings()
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    reward: RewardSettings = RewardSettings()
    filters: FilterSettings = FilterSettings()
    bus: BusSettings = BusSettings()
    weight_sync: WeightSyncSettings = WeightSyncSettings()
    engine: EngineSettings = EngineSettings()
    sampling: SamplingSettings = SamplingSettings()
    rollouter: RollouterSettings = RollouterSettings()
    tools: ToolSettings = ToolSettings()
    gateway: GatewaySettings = GatewaySettings()
    trainer: TrainerSettings = TrainerSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    tracking: TrackingSettings = TrackingSettings()
    logging: LoggingSettings = LoggingSettings()

    @model_validator(mode="after")
    def _contradictions(self) -> Settings:
        problems = []
        if self.samples_per_step % self.group_size:
            low = max(self.group_size, self.samples_per_step // self.group_size * self.group_size)
            problems.append(
                f"samples_per_step={self.samples_per_step} is no multiple of group_size={self.group_size} "
                f"(nearest: {low} or {(self.samples_per_step // self.group_size + 1) * self.group_size})"
            )
        if self.weight_sync.lora == "adapter" and not 0 < self.trainer.lora_rank <= MAX_ENGINE_LORA_RANK:
            problems.append(
                f"weight_sync.lora=adapter with trainer.lora_rank={self.trainer.lora_rank}: engines take ranks from 1 to "
                f"{MAX_ENGINE_LORA_RANK}"
            )
        if self.min_survivors > self.group_size:
            problems.append(f"min_survivors={self.min_survivors} is above group_size={self.group_size}: none could be trained")
        if self.rollouter.max_concurrent_rollouts < self.group_size:
            problems.append(
                f"rollouter.max_concurrent_rollouts={self.rollouter.max_concurrent_rollouts} is below "
                f"group_size={self.group_size}: no group could ever start"
            )
        if self.bus.max_queued_samples < self.samples_per_step:
            problems.append(
                f"bus.max_queued_samples={self.bus.max_queued_samples} is below samples_per_step={self.samples_per_step}: "
                "no step could ever fill"
            )
        if self.sampling.max_tokens >= self.engine.max_model_len:
            problems.append(
                f"sampling.max_tokens={self.sampling.max_tokens} leaves no room for a prompt in "
                f"engine.max_model_len={self.engine.max_model_len}"
            )
        overlong_at = self.reward.overlong_max_tokens or self.sampling.max_tokens
        if self.reward.overlong_buffer_tokens > overlong_at:
            problems.append(
                f"reward.overlong_buffer_tokens={self.reward.overlong_buffer_tokens} is above the {overlong_at} tokens of "
                f"{'sampling.max_tokens' if self.reward.overlong_max_tokens is None else 'reward.overlong_max_tokens'}: "
                "every rollout would be overlong"
            )
        if self.evaluation.every_versions and not self.data.held_out_fraction:
            problems.append(
                f"evaluation.every_versions={self.evaluation.every_versions}: data.held_out_fraction=0 leaves no task for it"
            )
        if self.data.weights and len(self.data.weights) != len(self.data.sources):
            problems.append(
                f"data.weights: got {len(self.data.weights)}, expected one for each of {len(self.data.sources)} sources"
            )
        if not self.data.sources:
            problems.append("data.source: got no source, expected at least one")
        if self.data.curriculum is not None and (self.data.weights or self.data.filter == "lazy"):
            problems.append("data.curriculum orders all tasks itself: it goes with neither data.weights nor data.filter=lazy")
        if self.filters.min_pass_rate > self.filters.max_pass_rate:
            problems.append(
                f"filters.min_pass_rate={self.filters.min_pass_rate} is above "
                f"filters.max_pass_rate={self.filters.max_pass_rate}"
            )
        if self.trigger_parameter_sync_step > self.num_steps:
            problems.append(
                f"trigger_parameter_sync_step={self.trigger_parameter_sync_step} is above num_steps={self.num_steps}: nothing "
                "would be published before the end"
            )
        if self.auto_staleness.min > self.auto_staleness.max:
            problems.append(
                f"auto_staleness.min={self.auto_staleness.min} is above auto_staleness.max={self.auto_staleness.max}"
            )
        if self.engine.max_requests is not None and self.engine.max_requests > self.engine.max_num_seqs:
            problems.append(
                f"engine.max_requests={self.engine.max_requests} is above engine.max_num_seqs={self.engine.max_num_seqs}: "
                "those beyond would wait inside the engine"
            )
        if self.bus.heartbeat_timeout_s <= 2 * self.bus.heartbeat_interval_s:
            problems.append(
                f"bus.heartbeat_timeout_s={self.bus.heartbeat_timeout_s} must be more than twice "
                f"bus.heartbeat_interval_s={self.bus.heartbeat_interval_s}"
            )
        insecurity = tcp_insecurity(self.bus.address, has_keys=self.bus.keys_dir is not None)
        if insecurity is not None and not self.bus.allow_insecure:
            problems.append(insecurity)
        mismatch = problem_of_transport(
            self.bus.transport,
            self.bus.address,
            has_password=self.bus.redis_password_file is not None,
            allow_insecure=self.bus.allow_insecure,
        )
        if mismatch is not None:
            problems.append(mismatch)
        weights = self.weight_sync
        if (
            weights.transport == "collective"
            and not self.bus.allow_insecure
            and not is_loopback(weights.listen_host.strip("[]"))
        ):
            problems.append(
                f"weight_sync.listen_host={weights.listen_host} with weight_sync.transport=collective sends the weights in "
                "plain to whoever can reach it: use weight_sync.transport=tcp (or set bus.allow_insecure=true)"
            )
        if (
            weights.advertised_host is not None
            and is_loopback(weights.advertised_host.strip("[]"))
            and not is_loopback(weights.listen_host.strip("[]"))
        ):
            problems.append(
                f"weight_sync.advertised_host={weights.advertised_host} leads nowhere from other hosts, and "
                f"weight_sync.listen_host={weights.listen_host} is meant for them"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def samples_per_period(self) -> int:
        """K: samples consumed per sync period."""
        return self.trigger_parameter_sync_step * self.samples_per_step
