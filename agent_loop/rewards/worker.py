"""A reward process: `python -m agent_loop.rewards.worker`. Loads reward functions and calls them as it is asked to.

Invariant: one frame in, one frame out, whatever the functions do: they run in the main thread (time limits by signals work),
what they print goes to standard error, what they raise becomes an outcome. The process dies with its parent; what it forks
stays below it, so that whoever kills it can kill them all.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import resource
import selectors
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from agent_loop.errors import BadGroundTruth, RewardError, RewardUnavailable, Unscored, words_of
from agent_loop.rewards.frames import PREFIX_BYTES, Answer, Outcome, OutcomeKind, Ready, Reply, Request, Start, parse
from agent_loop.rewards.loading import Form, Reward, checked_batch, is_iterable, load_reward
from agent_loop.rewards.score import score_of
from agent_loop.rewards.time_left import limited_to

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MAX_CHILDREN = 16
"""Processes that a reward may keep between its calls."""
_FULL = 0.75
"""Share of the memory limit at which the process asks to be replaced, before a call runs into it."""
_INFRASTRUCTURE = frozenset(
    {
        "APIConnectionError",
        "APITimeoutError",
        "ClientConnectionError",
        "ConnectionError",
        "InternalServerError",
        "RateLimitError",
        "ServerTimeoutError",
        "TransportError",
    }
)
"""Names of error classes, of the usual clients, that say that a service was not there."""
_KINDS = {
    OutcomeKind.BAD_GROUND_TRUTH: BadGroundTruth,
    OutcomeKind.UNSCORED: Unscored,
    OutcomeKind.UNAVAILABLE: RewardUnavailable,
    OutcomeKind.FAILED: RewardError,
}


def main() -> None:
    """Serve until standard input closes."""
    _end_with_parent()
    incoming, outgoing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)
    os.dup2(2, 1)
    start = Start.decode(_read(incoming))
    sys.path[:] = list(start.sys_path)
    _limit(start.max_memory_bytes)
    try:
        rewards = [load_reward(spec.path, spec.arguments) for spec in start.functions]
        for reward in rewards:
            self_test(reward)
    except RewardError as error:
        _write(outgoing, Ready(refused=str(error)).encode())
        return
    if any(reward.form is Form.ASYNC for reward in rewards):
        _run(lambda: _test_and_serve(rewards, incoming, outgoing, start.max_memory_bytes))
    else:
        _write(outgoing, Ready(forms=tuple(reward.form for reward in rewards)).encode())
        _serve(rewards, incoming, outgoing, start)


def self_test(reward: Reward) -> None:
    """Score the known-correct pairs that a function brings as `self_test`: (solution_str, ground_truth), each of which must be
    above 0; a batched function gets them all at once, an async one is left to `self_test_async`. Raises RewardError."""
    replies = self_test_replies(reward)
    if reward.form is Form.BATCHED and replies:
        for reply, outcome in zip(replies, call(reward, replies), strict=True):
            _check_self_test(reward, reply, outcome)
    elif reward.form is Form.BLOCKING:
        for reply in replies:
            _check_self_test(reward, reply, call(reward, [reply])[0])


async def self_test_async(reward: Reward) -> None:
    """The same for an async function, on the event loop that serves, to which it may bind its clients. Raises RewardError."""
    if reward.form is Form.ASYNC:
        for reply in self_test_replies(reward):
            _check_self_test(reward, reply, await call_async(reward, reply))


def self_test_replies(reward: Reward) -> list[Reply]:
    """Of a rollout of one turn; `extra_info` has what every reward is told, and no row's own."""
    function = getattr(reward.function, "func", reward.function)
    return [
        Reply(
            data_source="self test",
            solution_str=solution_str,
            ground_truth=ground_truth,
            extra_info={
                "prompt_text": "",
                "num_turns": 1,
                "stop_reason": "stop",
                "turns": [solution_str],
                "segments": [solution_str],
                "turn_segments": [0],
            },
        )
        for solution_str, ground_truth in getattr(function, "self_test", ())
    ]


def _check_self_test(reward: Reward, reply: Reply, outcome: Outcome) -> None:
    if outcome.score is None or outcome.score.value <= 0:
        got = outcome.words if outcome.score is None else f"a score of {outcome.score.value:g}"
        raise RewardError(
            f"reward {reward.path}: the self test got {got} for {reply.solution_str!r} against {reply.ground_truth!r}, "
            "expected a score above 0"
        )


def call(reward: Reward, replies: Sequence[Reply]) -> list[Outcome]:
    """One call of a blocking or batched function; one outcome a reply."""
    try:
        if reward.form is Form.BATCHED:
            values = reward.function(
                data_sources=[one.data_source for one in replies],
                solution_strs=[one.solution_str for one in replies],
                ground_truths=[one.ground_truth for one in replies],
                extra_infos=[dict(one.extra_info) for one in replies],
            )
        else:
            values = [
                reward.function(one.data_source, one.solution_str, one.ground_truth, dict(one.extra_info)) for one in replies
            ]
        listed = list(values) if is_iterable(values) else values  # the code of a generator runs here
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is an outcome
        return [_failure(reward, error, replies[0].data_source)] * len(replies)
    try:
        values = checked_batch(listed, expected=len(replies), path=reward.path)
    except RewardError as error:
        return [Outcome(kind=OutcomeKind.MISCOUNTED, words=str(error))] * len(replies)
    return [_outcome(reward, value, one) for value, one in zip(values, replies, strict=True)]


async def call_async(reward: Reward, reply: Reply) -> Outcome:
    """One call of an async function. Raises CancelledError where its task is cancelled, not where the function says so."""
    try:
        value = await reward.function(reply.data_source, reply.solution_str, reply.ground_truth, dict(reply.extra_info))
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        return _failure(reward, error, reply.data_source)
    return _outcome(reward, value, reply)


def _outcome(reward: Reward, value: Any, reply: Reply) -> Outcome:
    try:
        return Outcome(kind=OutcomeKind.SCORED, score=score_of(value, path=reward.path))
    except BaseException as error:  # noqa: BLE001 - a value whose __float__ is the user's
        return _failure(reward, error, reply.data_source)


def _failure(reward: Reward, error: BaseException, data_source: str) -> Outcome:
    if isinstance(error, RewardError):
        words = words_of(error).removeprefix(f"{type(error).__name__}: ")
        for kind, of in _KINDS.items():
            if isinstance(error, of):
                return Outcome(kind=kind, words=words)
    with contextlib.suppress(Exception):  # standard error may be closed by now
        traceback.print_exception(error)
    kind = OutcomeKind.UNAVAILABLE if _is_infrastructure(error) else OutcomeKind.FAILED
    return Outcome(kind=kind, words=f"reward {reward.path} raised {words_of(error)} (data source {data_source}){_place(error)}")


def _is_infrastructure(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_infrastructure, error.exceptions))
    is_ours = isinstance(error, (MemoryError, RewardUnavailable))
    return is_ours or any(base.__name__ in _INFRASTRUCTURE for base in type(error).__mro__)


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f", {Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""


def _serve(rewards: Sequence[Reward], incoming: BinaryIO, outgoing: BinaryIO, start: Start) -> None:
    own = os.getpid()
    while True:
        value = _read(incoming)
        request = Request.decode(value)
        if not request.replies:
            continue
        with limited_to(start.timeout_s):
            outcomes = call(rewards[request.function], request.replies)
        _end_if_forked(own)
        retire = _is_to_be_replaced(start.max_memory_bytes)
        _write(outgoing, Answer(number=request.number, outcomes=tuple(outcomes), retire=retire).encode())


class _OwnSelector(selectors.DefaultSelector):
    """Ends a process that an async reward forked and that came back to the event loop, whose pipes are its parent's."""

    def __init__(self) -> None:
        super().__init__()
        self._owner = os.getpid()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        _end_if_forked(self._owner)
        found: list[tuple[selectors.SelectorKey, int]] = super().select(timeout)
        return found


def _run(serve: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Until it is over, whatever tasks of rewards raise: asyncio lets a SystemExit of any of them end its loop."""
    loop = asyncio.SelectorEventLoop(_OwnSelector())
    asyncio.set_event_loop(loop)
    serving = loop.create_task(serve())
    serving.add_done_callback(lambda _: loop.stop())
    while not serving.done():
        with contextlib.suppress(BaseException):  # whoever awaits the task is told
            loop.run_forever()
    serving.result()


def _end_if_forked(own: int) -> None:
    if os.getpid() != own:
        os._exit(0)  # a reward forked, and its child came back here


async def _test_and_serve(
    rewards: Sequence[Reward], incoming: BinaryIO, outgoing: BinaryIO, max_memory_bytes: int | None
) -> None:
    try:
        for reward in rewards:
            await self_test_async(reward)
    except RewardError as error:
        _write(outgoing, Ready(refused=str(error)).encode())
        return
    _write(outgoing, Ready(forms=tuple(reward.form for reward in rewards)).encode())
    await _serve_concurrently(rewards, incoming, outgoing, max_memory_bytes)


async def _serve_concurrently(
    rewards: Sequence[Reward], incoming: BinaryIO, outgoing: BinaryIO, max_memory_bytes: int | None
) -> None:
    running: dict[int, asyncio.Task[None]] = {}
    own = os.getpid()

    async def answer(request: Request) -> None:
        try:
            outcome = await call_async(rewards[request.function], request.replies[0])
        except asyncio.CancelledError:
            outcome = Outcome(kind=OutcomeKind.FAILED, words="taken back")
        finally:
            running.pop(request.number, None)
        _end_if_forked(own)
        retire = _is_to_be_replaced(max_memory_bytes)
        _write(outgoing, Answer(number=request.number, outcomes=(outcome,), retire=retire).encode())

    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), incoming)
    while True:
        try:
            size = int.from_bytes(await reader.readexactly(PREFIX_BYTES), "big")
            request = Request.decode(parse(await reader.readexactly(size)))
        except asyncio.IncompleteReadError:
            return
        if request.replies:
            running[request.number] = asyncio.create_task(answer(request))
        elif request.number in running:
            running[request.number].cancel()


def _read(incoming: BinaryIO) -> Any:
    prefix = incoming.read(PREFIX_BYTES)
    if len(prefix) < PREFIX_BYTES:
        raise SystemExit(0)
    body = incoming.read(int.from_bytes(prefix, "big"))
    return parse(body)


def _write(outgoing: BinaryIO, data: bytes) -> None:
    outgoing.write(data)
    outgoing.flush()


def _end_with_parent() -> None:
    parent = os.getppid()
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit(0)


def _limit(max_memory_bytes: int | None) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if max_memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (max_memory_bytes, max_memory_bytes))
    os.nice(5)  # scoring yields to what generates
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("800")


def _is_to_be_replaced(max_memory_bytes: int | None) -> bool:
    """Reap what has ended below this process; whether it has grown too large or keeps too many children."""
    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        if max_memory_bytes is not None and pages * resource.getpagesize() > _FULL * max_memory_bytes:
            return True
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        return len(children) > _MAX_CHILDREN
    return False


if __name__ == "__main__":
    main()
