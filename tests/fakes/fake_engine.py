"""Engines and a tokenizer without a model: deterministic, controllable, as strict as the real ones.

`FakeEngine` implements `agent_loop.engine.Engine` and `rollouter.engines.EngineFleet`. Its weights are a version number: each
sampled token bears the version held when it was sampled. Requests wait until the first weights are there and while weights are
being replaced, as they do in the engine pool.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from agent_loop.engine import Generation, SamplingParams
from sample_bus.messages import EngineStatus, RoundResult, WeightRound
from sample_bus.weight_checks import EngineWeights, WorkerWeights

EOS = 0
ALPHABET = "\n0123456789abcdefghijklmnopqrstuvwxyz=+ ,.:<>|/ABCDEFGHIJKLMNOPQRSTUVWXYZ_-"


class FakeTokenizer:
    """One token a character; id 0 is the end-of-sequence token. Implements `rollouter.codec.Tokenizer`."""

    eos_token_id: int | None = EOS

    def __init__(self, *, adds_bos: bool = False, chat_template: bool = True) -> None:
        self._adds_bos = adds_bos
        self._chat_template = chat_template
        self.bos = len(ALPHABET) + 1

    def __len__(self) -> int:
        return len(ALPHABET) + 2

    @property
    def chat_template(self) -> str:
        return "role:content" if self._chat_template else ""

    def get_added_vocab(self) -> dict[str, int]:
        return {"<eos>": EOS, "<bos>": self.bos}

    def encode(self, text: str, *, add_special_tokens: bool, split_special_tokens: bool = False) -> list[int]:
        ids: list[int] = []
        for part in [text.replace("<bos>", "bos")] if split_special_tokens else text.split("<bos>"):
            ids += [ALPHABET.index(char) + 1 for char in part] + [self.bos]
        del ids[-1]
        return [self.bos, *ids] if add_special_tokens and self._adds_bos else ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        names = {EOS: "<eos>", self.bos: "<bos>"}
        return "".join(
            ("" if skip_special_tokens else names[token]) if token in names else ALPHABET[token - 1] for token in token_ids
        )

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool, tools: Any = None) -> Any:
        if not self._chat_template:
            raise ValueError("this tokenizer has no chat template")
        text = (
            "<bos>"
            + "".join(f"{tool['function']['name']}\n" for tool in tools or ())
            + "".join(f"{message['role']}:{message['content']}\n" for message in conversation)
        )
        return text + ("assistant:" if add_generation_prompt else "")


Reply = Callable[[npt.NDArray[np.int32], SamplingParams, int], Sequence[int]]
"""(prompt ids, sampling, version) → token ids."""


def solve_addition(prompt_ids: npt.NDArray[np.int32], sampling: SamplingParams, version: int) -> list[int]:
    """Answers the last line of the prompt, `a+b=`; right in three of four seeds, so that groups have a spread."""
    tokenizer = FakeTokenizer()
    line = tokenizer.decode(prompt_ids.tolist(), skip_special_tokens=True).rsplit("\n", 1)[-1]
    a, b = line.rstrip("=").split("+")
    wrong = 1 if (sampling.seed or 0) % 4 == 0 else 0
    return tokenizer.encode(f"{int(a) + int(b) + wrong}\n", add_special_tokens=False)


@dataclass(slots=True, kw_only=True)
class Call:
    """One request that reached the engine."""

    request_id: str
    sampling: SamplingParams
    prompt_ids: npt.NDArray[np.int32]
    version: int


@dataclass(slots=True, eq=False)
class FakeEngine:
    """One engine and its fleet."""

    reply: Reply = solve_addition
    before_reply: Callable[[Call], Any] | None = None
    """May raise, or return an awaitable that the generation waits for."""
    make_generation: Callable[[Call, Sequence[int]], Generation] | None = None
    """Replaces the generation, for broken ones."""
    fails_syncs: int = 0
    """So many next syncs fail."""
    before_sync: Callable[[WeightRound], Any] | None = None
    on_stage: Callable[[WeightRound, str, str], Any] | None = None
    """(round, engine, nonce): the weights of this round have arrived here; the trainer's side hears of it this way."""
    on_round_result: Callable[[RoundResult], None] | None = None
    """Hears how it caught up."""
    launched: bool = False
    name: str = "engine-0"
    version: int | None = None
    calls: list[Call] = field(default_factory=list)
    _round_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    synced: list[tuple[str, int]] = field(default_factory=list)
    started_with: tuple[str, str] | None = None
    closed: bool = False
    num_running: int = 0
    _generated: int = 0
    _serving: asyncio.Event = field(default_factory=asyncio.Event)
    _trouble: asyncio.Event = field(default_factory=asyncio.Event)
    _newest: tuple[WeightRound, Callable[[WeightRound, str, str], Any]] | None = None
    _nonce: int = 0

    async def launch(self) -> None:
        self.launched = True

    async def start(self, model_dir: str, dtype: str) -> None:
        assert self.launched, "start before launch"
        self.started_with = (model_dir, dtype)

    async def supervise(self) -> None:
        """As the pool does: after a failed round it catches up by itself."""
        while True:
            await self._trouble.wait()
            self._trouble.clear()
            await asyncio.sleep(0.01)
            assert self._newest is not None, "trouble before any round"
            result = await self._bring(*self._newest)
            if self.on_round_result is not None:
                self.on_round_result(result)

    async def generate(self, prompt_ids: npt.NDArray[np.int32], sampling: SamplingParams, *, request_id: str) -> Generation:
        await self._serving.wait()
        assert self.version is not None, "a request was served before any weights were loaded"
        call = Call(request_id=request_id, sampling=sampling, prompt_ids=prompt_ids, version=self.version)
        self.calls.append(call)
        self.num_running += 1
        try:
            if self.before_reply is not None:
                waited = self.before_reply(call)
                if waited is not None:
                    await waited
            await self._serving.wait()
            tokens = list(self.reply(prompt_ids, sampling, self.version))[: sampling.max_tokens]
            if self.make_generation is not None:
                return self.make_generation(call, tokens)
            generation = generation_of(tokens, self.version, sampling)
        finally:
            self.num_running -= 1
        self._generated += len(tokens)
        return generation

    async def sync(self, round: WeightRound, wait_staged: Callable[[WeightRound, str, str], Any]) -> list[RoundResult]:
        self._newest = (round, wait_staged)
        if self.before_sync is not None:
            waited = self.before_sync(round)
            if waited is not None:
                await waited
        return [await self._bring(round, wait_staged)]

    async def _bring(self, round: WeightRound, wait_staged: Callable[[WeightRound, str, str], Any]) -> RoundResult:
        """Like the pool: one round at a time, and a version that is held already is not brought again."""
        async with self._round_lock:
            held = (round.incarnation, round.policy_version)
            if self.version is not None and self.synced and self.synced[-1] == held:
                return self._result(round, committed=True)
            return await self._stage_and_commit(round, wait_staged)

    async def _stage_and_commit(self, round: WeightRound, wait_staged: Callable[[WeightRound, str, str], Any]) -> RoundResult:
        self._nonce += 1
        if self.fails_syncs:
            self.fails_syncs -= 1
            self._trouble.set()
            return self._result(round, committed=False, message="the engine was told to fail")
        try:
            if self.on_stage is not None:
                await self.on_stage(round, self.name, self.nonce)
            await wait_staged(round, self.name, self.nonce)
        except Exception as error:  # noqa: BLE001 - like the pool: an engine's failure is a result
            self._trouble.set()
            return self._result(round, committed=False, message=str(error))
        self._serving.clear()
        await asyncio.sleep(0)
        self.version = round.policy_version
        self.synced.append((round.incarnation, round.policy_version))
        self._serving.set()
        return self._result(round, committed=True)

    async def check_weights(self, *, effective: bool) -> list[EngineWeights]:
        """Its weights are one tensor: the version."""
        number = 1 if effective and self.version is not None else None
        held = WorkerWeights(
            policy_version=self.version,
            checksums={} if self.version is None else {"version": f"{self.version:016x}"},
            num_equal=number,
        )
        return [EngineWeights(incarnation="", request_id=0, engine=self.name, num_engines=1, workers=(held,))]

    def statuses(self) -> tuple[EngineStatus, ...]:
        state = "serving" if self._serving.is_set() else "waiting for weights"
        return (EngineStatus(name=self.name, state=state, policy_version=self.version, num_running=self.num_running),)

    @property
    def policy_version(self) -> int | None:
        return self.version

    @property
    def generated_tokens(self) -> int:
        return self._generated

    @property
    def nonce(self) -> str:
        """Of the newest staging."""
        return f"{self.name}-{self._nonce}"

    async def close(self) -> None:
        self.closed = True

    def _result(self, round: WeightRound, *, committed: bool, message: str = "") -> RoundResult:
        digest = round.manifest_digest if committed else ""
        return RoundResult(
            policy_version=round.policy_version, engine=self.name, committed=committed, manifest_digest=digest, message=message
        )


def generation_of(tokens: Sequence[int], version: int, sampling: SamplingParams) -> Generation:
    """Tokens of one version, each with logprob -0.5."""
    ended = bool(tokens) and tokens[-1] in sampling.stop_token_ids
    return Generation(
        token_ids=np.array(tokens, np.int32),
        logprobs=np.full(len(tokens), -0.5, np.float32),
        version_starts=np.array([0], np.int32),
        versions=np.array([version], np.int32),
        kept_cache=np.zeros(1, np.uint8),
        stop_reason="stop" if ended else "length",
    )
