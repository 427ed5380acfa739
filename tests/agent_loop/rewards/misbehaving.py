"""Reward functions that do what user code does at its worst; loaded by reward processes, by path."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from agent_loop.errors import RewardError, RewardUnavailable

_KEPT: list[bytes] = []


class TimedOut(BaseException):
    """As of func_timeout, gevent and trio."""


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class WordlessFailure(RewardError):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Numberless:
    """As a tensor of two elements."""

    def __float__(self) -> float:
        raise RuntimeError("cannot be converted to a scalar")


def by_word(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> Any:
    """Does what the reply says; 1.0 for anything else."""
    match solution_str.split(" ", 1)[0]:
        case "spin-in-c":
            re.match(r"(a+)+$", "a" * 64 + "b")
        case "spin-in-python":
            while True:
                pass
        case "sleep":
            time.sleep(600)
        case "ignore-signals":
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
                signal.signal(number, signal.SIG_IGN)
            time.sleep(600)
        case "die":
            os._exit(7)
        case "crash":
            ctypes.string_at(0)
        case "exit":
            sys.exit(3)
        case "raise":
            raise KeyError("golden")
        case "none":
            return None
        case "print":
            os.write(1, b"noise " * 20_000)
            sys.stdout.write("more noise\n")
        case "fork":
            if os.fork() == 0:
                return 0.5
        case "children":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
            Path(str(ground_truth)).write_text(f"{child.pid} {os.getpid()}")
            time.sleep(600)
        case "leak":
            _KEPT.append(b"x" * (1 << 28))
        case "pid":
            return {"score": 1.0, "pid": os.getpid()}
        case "down":
            raise RewardUnavailable("the judge is down")
        case "connection":
            raise ConnectionRefusedError("nobody listens")
        case "down-once":
            flag = Path(str(ground_truth))
            if not flag.exists():
                flag.touch()
                raise RewardUnavailable("the judge is down")
        case "timed-out":
            raise TimedOut("took long")
        case "says-cancelled":
            raise asyncio.CancelledError
        case "leaves":
            raise GeneratorExit
        case "group":
            raise BaseExceptionGroup("two", [TimedOut("x"), ValueError("y")])
        case "group-down":
            raise ExceptionGroup("two", [ConnectionRefusedError("x"), RewardUnavailable("y")])
        case "odd-words":
            raise ValueError("a\ud800b" + "x" * 100_000)
        case "no-words":
            raise Wordless
        case "own-words":
            raise WordlessFailure
        case "odd-parts":
            names: dict[Any, float] = {"a\ud800": 2.0, None: 3.0, "n" * 1000: 4.0}
            return {"score": 1.0, "tensor": Numberless(), "nan": float("nan"), **names, **{f"n{n}": 0 for n in range(1000)}}
        case "odd-score":
            return {"score": Numberless()}
        case "fork-and-die":
            if os.fork() == 0:
                time.sleep(600)
            os.kill(os.getpid(), signal.SIGKILL)
        case "alarm":
            signal.signal(signal.SIGALRM, lambda *_: None)
            signal.alarm(1)
            signal.alarm(0)
    return 1.0


async def by_word_async(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> Any:
    match solution_str:
        case "sleep":
            await asyncio.Event().wait()
        case "block":
            threading.Event().wait()
        case "stubborn":
            while True:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    pass
        case "pid":
            return {"score": 1.0, "pid": os.getpid()}
        case "raise":
            raise KeyError("golden")
        case "timed-out":
            raise TimedOut("took long")
        case "says-cancelled":
            raise asyncio.CancelledError
        case "exit-in-a-task":
            await asyncio.gather(_exits(), asyncio.sleep(0))
        case "group-down":
            async with asyncio.TaskGroup() as group:
                group.create_task(_refused())
        case "fork-and-return":
            if os.fork() == 0:
                return 0.25
            await asyncio.sleep(0.2)
        case "fork-and-go-on":
            child = os.fork()
            await asyncio.sleep(0.2)
            return float(child > 0)
    await asyncio.sleep(0.01)
    return 1.0


async def _exits() -> None:
    sys.exit(3)


async def _refused() -> None:
    raise ConnectionRefusedError("nobody listens")


def lazy_batch(data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any) -> Any:
    """Fails where its scores are looked at."""
    return (1 / len(says) for says in solution_strs)


def batch(data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any) -> Any:
    """Scores with the size of the batch as a part; fails, hangs or miscounts as a whole when a reply says so."""
    if "raise" in solution_strs:
        raise KeyError("golden")
    if "sleep" in solution_strs:
        time.sleep(600)
    scores: list[Any] = [{"score": 1.0, "size": len(solution_strs)} for _ in solution_strs]
    if "short" in solution_strs:
        return scores[:-1]
    return [*scores, 1.0] if "long" in solution_strs else scores


def echo(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, *, factor: float = 1.0) -> Any:
    """What arrived, said by its representation."""
    raise ValueError(repr((data_source, ground_truth, extra_info, factor)))


def length(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    return float(len(solution_str))


def not_a_number(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    return 0.0


not_a_number.self_test = (("right", "right"),)  # type: ignore[attr-defined]


async def wrong_later(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    return 0.0


def wrong_together(data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any) -> list[float]:
    return [float(solution == truth) for solution, truth in zip(solution_strs, ground_truths, strict=True)]


def of_turns(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, Any]:
    """Looks at all that a reward is told."""
    told = [extra_info[name] for name in ("prompt_text", "num_turns", "stop_reason", "turns", "segments", "turn_segments")]
    return {"score": 1.0, "turn_rewards": [0.0 for _ in told[3]]}


wrong_later.self_test = (("right", "right"),)  # type: ignore[attr-defined]
wrong_together.self_test = (("right", "right"), ("almost", "right"))  # type: ignore[attr-defined]
of_turns.self_test = (("right", "right"),)  # type: ignore[attr-defined]


def by_truth(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> Any:
    """Does what the ground truth says; 0.0 for anything else: the reply is wrong."""
    return 0.0 if by_word(data_source, str(ground_truth), "", extra_info) is not None else None


_CALLS: list[int] = []


def one_in_a_hundred(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Fails each hundredth time, in one way after the other."""
    _CALLS.append(0)
    if len(_CALLS) % 100 == 0:
        by_word(data_source, ("raise", "sleep", "none-at-all", "exit")[len(_CALLS) // 100 % 4], "")
        raise ValueError("this one fails")
    return 1.0
