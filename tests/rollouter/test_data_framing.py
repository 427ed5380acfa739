"""What an agent loop puts around a prompt counts against the prompt's limit: the chat template, and the tools that it tells."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent_loop.engine import SamplingParams
from agent_loop.errors import LoopError
from agent_loop.loop import LoopSetup, load_agent_loop
from agent_loop.session import Session
from agent_loop.single_turn import SingleTurn
from agent_loop.task import Task
from agent_loop.tool_calling import ToolCalling
from agent_loop.toolbox import ToolBox
from agent_loop.tools import FunctionTool
from configs.errors import ConfigError
from configs.schema import DataSettings, ToolSettings
from console.cli import main
from rollouter.codec import load_codec
from rollouter.data.encoding import Limits, OnOverlong, Refusal, task_of
from rollouter.data.framing import Framing
from rollouter.data.measure import Model, measure
from rollouter.data.rows import Row
from rollouter.data.sources import open_rows
from rollouter.errors import DataError
from rollouter.loops import Loops
from rollouter.prompts import encode, prepare
from tests.agent_loop.chat_models import FAMILIES, make_codec, make_tokenizer
from tests.agent_loop.scripted import ScriptedEngine, generation
from tests.rollouter.stand_in import engine_of, make_settings, running_rollouter, stand_in_trainer

CODEC = make_codec(FAMILIES["qwen2.5"])
END = "<|im_end|>"


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers."""
    return a * b


class Plain:
    """A loop of one's own that is made late and needs no preparing."""

    async def run(self, task: Task, session: Session) -> None: ...


class Prepared(Plain):
    async def open(self) -> None: ...


class Clumsy(Plain):
    shows = ("tool",)
    calls_tools = True

    def schemas(self) -> list[dict[str, Any]]:
        raise KeyError("nothing is open")


BOX = ToolBox(ToolSettings(), [FunctionTool(multiply)])
FRAMING = Framing(tools={"": BOX.schemas()})
SOURCE = ToolSettings(sources=(f"{__name__}:multiply",))


def loops_of(*names: str, default: str = "tool_calling", tools: ToolSettings = SOURCE, environment: str | None = None) -> Loops:
    setup = LoopSetup(tools=tools, environment=environment)
    return Loops(load_agent_loop(default, setup), default_path=default, names=names, setup=setup)


def row_of(prompt: Any) -> Row:
    return Row(prompt=prompt, ground_truth="x", data_source="d")


def messages_of(text: str) -> tuple[dict[str, Any], ...]:
    return ({"role": "system", "content": "Be brief."}, {"role": "user", "content": text})


@pytest.mark.parametrize("as_messages", [False, True])
@pytest.mark.parametrize("name", sorted(FAMILIES))
async def test_a_prompt_is_counted_as_the_loop_shows_it(name: str, as_messages: bool) -> None:
    """B112: the very ids that go to the engine first."""
    codec = make_codec(FAMILIES[name])
    row = row_of(messages_of("2*3") if as_messages else "2*3")
    task = task_of(row, codec, Limits(max_prompt_tokens=4096, framing=FRAMING))
    assert isinstance(task, Task)
    engine = ScriptedEngine(generation(codec.encode("6" + FAMILIES[name].end)))
    session = Session(engine, SamplingParams(temperature=1.0, max_tokens=9), rollout_id="r.0", max_model_len=4096, codec=codec)
    await ToolCalling(BOX, ToolSettings()).run(task, session)
    assert FRAMING.length_of(row, codec) == int((session.trajectory().loss_mask == 0).sum())


@pytest.mark.parametrize("as_messages", [False, True])
@pytest.mark.parametrize(
    ("on_overlong", "sizes"),
    [("drop", [4095, 4096]), ("left", [4095, 4096, 4096, 4096]), ("right", [4095, 4096, 4096, 4096])],
)
def test_no_prompt_is_longer_than_its_limit_with_the_tools_told_in_it(
    on_overlong: str, sizes: list[int], as_messages: bool
) -> None:
    """B112: 4095, 4096, 4097 and 40000 tokens, as text and as messages, with tools."""
    limits = Limits(max_prompt_tokens=4096, on_overlong=OnOverlong(on_overlong), framing=FRAMING)
    made = messages_of if as_messages else str
    around = FRAMING.length_of(row_of(made("")), CODEC)
    assert around > CODEC.encode_prompt(messages_of(""))[1].size + 50, "the schemas are in it"
    found: list[int] = []
    for wanted in (4095, 4096, 4097, 40_000):
        row = row_of(made("1" + "2" * (wanted - around - 2) + "3"))
        assert FRAMING.length_of(row, CODEC) == wanted
        task = task_of(row, CODEC, limits)
        if isinstance(task, Refusal):
            assert task is Refusal.OVERLONG
            continue
        kept = row_of(task.messages or task.prompt_text)
        found.append(FRAMING.length_of(kept, CODEC))
        if wanted > 4096:
            ends = ("12" in task.prompt_text, "23" in task.prompt_text)
            assert ends == ((False, True) if on_overlong == "left" else (True, False))
    assert found == sizes


def test_a_prompt_that_only_the_tools_make_too_long_is_refused_in_words_that_say_so() -> None:
    """B112"""
    row = row_of("2*3")
    length = FRAMING.length_of(row, CODEC)
    limits = Limits(max_prompt_tokens=length - 1, on_overlong=OnOverlong.ERROR, framing=FRAMING)
    with pytest.raises(DataError, match=rf"got {length} tokens, expected at most {length - 1} .*the schemas of tools count"):
        task_of(row, CODEC, limits)
    rows = [row, Row(prompt="2*3", ground_truth="x", data_source="d", agent_name="single_turn")]
    (task,) = encode_framed(rows, length - 1)
    assert task.agent_name == "single_turn"
    with pytest.raises(DataError, match=rf"the longest has {length}; the schemas of tools count"):
        encode_framed(rows[:1], length - 1)


def encode_framed(rows: list[Row], limit: int) -> list[Task]:
    return [
        issue.task
        for prompts in [
            prepare(rows, DataSettings(held_out_fraction=0), CODEC, seed=1, max_prompt_tokens=limit, framing=FRAMING)
        ]
        for _ in range(prompts.source.num_tasks)
        if (issue := prompts.source.next()) is not None
    ]


def test_without_a_framing_a_task_is_what_it_was() -> None:
    """Ids, texts and names of tasks do not depend on the tools: a run goes on when a tool changes its words."""
    rows = [row_of("2*3"), row_of(messages_of("2*3"))]
    framed = [task_of(row, CODEC, Limits(max_prompt_tokens=4096, framing=FRAMING)) for row in rows]
    for one, other in zip(framed, encode(rows, CODEC, max_prompt_tokens=4096), strict=True):
        assert isinstance(one, Task)
        assert (one.task_id, one.prompt_text, one.messages) == (other.task_id, other.prompt_text, other.messages)
        assert one.prompt_ids.tolist() == other.prompt_ids.tolist()


@pytest.mark.parametrize("processes", [1, 2])
def test_lengths_that_were_measured_with_other_tools_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    """B112: the kept result is found by the tools too."""
    make_tokenizer(FAMILIES["qwen2.5"]).save_pretrained(str(tmp_path / "model"))
    codec, model = load_codec(str(tmp_path / "model"), trust_remote_code=False), Model(directory=str(tmp_path / "model"))
    monkeypatch.setattr("rollouter.data.measure.ROWS_PER_JOB", 3)
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n}", "ground_truth": "x"}) + "\n" for n in range(9)))
    data = DataSettings(source=str(file), filter_processes=processes, cache_dir=tmp_path / "cache")
    rows = open_rows(data)
    lengths = []
    for framing in (Framing(), FRAMING, Framing(tools={"": []}), Framing(), FRAMING):
        found = measure(rows, data, codec, model, cache_dir=tmp_path / "cache", framing=framing)
        assert found.lengths.tolist() == [framing.length_of(rows[at], codec) for at in range(9)]
        lengths.append(int(found.lengths[0]))
    assert len(set(lengths)) == 3
    assert len(list((tmp_path / "cache" / "lengths").iterdir())) == 3


async def test_each_name_of_a_loop_is_framed_as_its_loop_does() -> None:
    loops = loops_of(
        f"mine={__name__}:Plain",
        "other=tool_calling",
        default="single_turn",
        environment="tests.agent_loop.test_environment:Guess",
    )
    loops.make_named()
    await loops.open_tools()
    try:
        tools = loops.framing().tools
    finally:
        await loops.close()
    told = {name for name, schemas in tools.items() if schemas}
    assert told == {"tool_calling", "tool_agent", "other", "agent_loop.tool_calling:ToolCalling"}
    assert set(tools) - told == {"environment", "agent_loop.environment:EnvironmentLoop"}
    assert all(tools[name] == BOX.schemas() for name in told)


async def test_a_loop_that_must_prepare_and_is_named_too_late_says_what_to_do() -> None:
    """B165: never a tool loop without its tools."""
    task = Task(task_id="t", prompt_ids=CODEC.encode_prompt("x")[1], prompt_text="x", ground_truth=1, data_source="d")
    loops = loops_of(default="single_turn", tools=ToolSettings())
    await loops.open()
    assert isinstance(loops.of(replace(task, agent_name=f"{__name__}:Plain")), Plain)
    with pytest.raises(LoopError, match=r"name it in rollouter\.agent_loops"):
        loops.of(replace(task, agent_name=f"{__name__}:Prepared"))
    loops.check([replace(task, agent_name=f"{__name__}:Prepared")])
    await loops.open()
    assert isinstance(loops.of(replace(task, agent_name=f"{__name__}:Prepared")), Prepared)
    assert isinstance(loops.of(task), SingleTurn)


class Listening(Plain):
    opened = 0

    async def open(self) -> None:
        Listening.opened += 1


async def test_before_the_prompts_are_measured_only_tools_are_loaded() -> None:
    """A gateway listens, and its programs start, when there is something to play."""
    loops = loops_of(f"mine={__name__}:Listening")
    loops.make_named()
    await loops.open_tools()
    assert loops.framing().has_tools
    assert Listening.opened == 0
    await loops.open()
    await loops.open()
    assert Listening.opened == 1
    await loops.close()


async def test_a_loop_that_cannot_name_its_tools_is_the_users_error() -> None:
    loops = loops_of(f"mine={__name__}:Clumsy")
    loops.make_named()
    with pytest.raises(ConfigError, match=r"Clumsy: its schemas\(\) raised KeyError"):
        loops.framing()


async def test_a_running_rollouter_counts_the_tools_of_its_loop(tmp_path: Path) -> None:
    """B112"""
    settings = make_settings(
        tmp_path, data={"max_prompt_tokens": 30}, rollouter={"agent_loop": "tool_calling"}, tools={"sources": SOURCE.sources}
    )
    loop = load_agent_loop("tool_calling", LoopSetup(tools=settings.tools, environment=None))
    async with stand_in_trainer(settings) as trainer, running_rollouter(settings, engine_of(trainer), loop=loop) as running:
        await trainer.begin()
        with pytest.raises(DataError, match=r"0 left after refusing prompts beyond 30 tokens .*the schemas of tools count"):
            await running.ended()


def test_data_check_counts_tools_and_refuses_a_template_that_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """B60, B112"""
    make_tokenizer(FAMILIES["qwen2.5"]).save_pretrained(str(tmp_path / "model"))
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "2*3", "ground_truth": "6"}) + "\n")
    length = FRAMING.length_of(row_of("2*3"), CODEC)
    words = ["rollouter.agent_loop=tool_calling", f"tools.sources=[{__name__}:multiply]", "engine.max_model_len=9999"]

    def check(limit: int) -> int:
        limited = [*words, f"data.max_prompt_tokens={limit}"]
        return main(["data", "check", str(file), *limited, "--tokenizer", str(tmp_path / "model")])

    assert check(length) == 0
    assert f"{length} tokens (at most {length})" in capsys.readouterr().out
    assert check(length - 1) == 1
    assert f"got {length} tokens, expected at most {length - 1}" in capsys.readouterr().out
    (tmp_path / "model" / "chat_template.jinja").write_text(
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    )
    assert check(length) == 1
    assert "error: chat template: the chat template leaves out messages of role tool: " in capsys.readouterr().out
