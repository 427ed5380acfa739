"""Data larger than memory: the same tasks in the same order whenever asked, found again by id; what is left out is counted."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.task import Task
from configs.schema import DataSettings
from rollouter import prompts as prompts_module
from rollouter.codec import Codec, load_codec
from rollouter.data import measure as measure_module
from rollouter.data.encoding import Limits, OnOverlong, Refusal, task_of
from rollouter.data.lazy import Hashed, LazyTasks
from rollouter.data.measure import BAD, Model, measure
from rollouter.data.rows import Row
from rollouter.data.sources import open_rows
from rollouter.errors import DataChanged, DataError
from rollouter.prompts import Issue, Prompts, PromptSource, Refused, prepare
from tests.fakes.fake_engine import FakeTokenizer
from tests.fakes.tiny_tokenizer import write_tiny_tokenizer

CODEC = Codec(FakeTokenizer())


def _file(path: Path, count: int = 200, *, long_every: int = 0, bad: int = -1) -> Path:
    rows = [
        {"prompt": f"{n}+1=" + ("1" * 40 if long_every and n % long_every == 0 else ""), "ground_truth": str(n + 1)}
        for n in range(count)
    ]
    if bad >= 0:
        del rows[bad]["ground_truth"]
    file = path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def _prepared(file: Path, *, codec: Codec = CODEC, model: Model | None = None, limit: int = 20, **data: object) -> Prompts:
    settings = DataSettings.model_validate({"source": str(file), "cache_dir": file.parent / "cache", **data})
    return prepare(open_rows(settings), settings, codec, seed=7, max_prompt_tokens=limit, model=model)


def _ids(source: PromptSource, count: int) -> list[str]:
    return [issue.task.task_id for _ in range(count) if (issue := source.next()) is not None]


def test_lazy_tasks_come_once_an_epoch_less_the_long_and_the_held_out_ones(tmp_path: Path) -> None:
    prompts = _prepared(_file(tmp_path, long_every=10), filter="lazy", num_epochs=1, held_out_fraction=0.25)
    seen: list[Issue | Refused] = []
    while (issue := prompts.source.peek()) is not None:
        prompts.source.skip(1)
        seen.append(issue)
    assert [issue.number for issue in seen] == list(range(200))
    tasks = [issue.task for issue in seen if isinstance(issue, Issue)]
    reasons = [issue.reason for issue in seen if isinstance(issue, Refused)]
    assert len({task.task_id for task in tasks}) == len(tasks) == 200 - len(reasons)
    assert reasons.count(Refusal.OVERLONG) in range(10, 21)
    assert reasons.count(Refusal.HELD_OUT) in range(25, 80)
    held_out = {task.prompt_text for task in prompts.held_out}
    assert held_out
    assert held_out.isdisjoint(task.prompt_text for task in tasks)
    for task in tasks[:20]:
        found = prompts.source.task(task.task_id)
        assert found is not None
        assert found.prompt_text == task.prompt_text
    assert prompts.source.task("rows/7x") is prompts.source.task("other/7") is prompts.source.task("rows/999") is None


@given(st.integers(0, 60), st.integers(0, 60))
def test_lazy_source_goes_on_where_it_was_after_a_restart(first: int, more: int) -> None:
    """B88"""
    rows = open_rows(DataSettings(source="addition"))
    data = DataSettings(source="addition", filter="lazy")
    straight = prepare(rows, data, CODEC, seed=3, max_prompt_tokens=100).source
    expected = _ids(straight, first + more)
    source = prepare(rows, data, CODEC, seed=3, max_prompt_tokens=100).source
    begun = _ids(source, first)
    resumed = prepare(rows, data, CODEC, seed=3, max_prompt_tokens=100).source
    resumed.restore(source.cursor)
    assert begun + _ids(resumed, more) == expected


def test_restart_over_data_that_changed_is_refused(tmp_path: Path) -> None:
    """B93"""
    cursor = _prepared(_file(tmp_path), filter="lazy").source.cursor
    file = _file(tmp_path)
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([lines[1], lines[0], *lines[2:]]))
    with pytest.raises(DataError, match="data changed"):
        _prepared(file, filter="lazy").source.restore(cursor)


def test_bad_row_of_lazy_data_is_left_out_and_is_an_error_where_all_are_measured(tmp_path: Path) -> None:
    file = _file(tmp_path, bad=5)
    source = _prepared(file, filter="lazy", num_epochs=1, held_out_fraction=0).source
    assert len(_ids(source, 300)) == 199
    with pytest.raises(DataError, match=r"rows\.jsonl row 6: ground_truth: the column is missing.* \(1 bad rows of 200\)"):
        _measured(file)


def _measured(file: Path, **data: object) -> Prompts:
    """With every row measured at the start, as where there are more than fit into memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts_module, "MAX_ROWS_IN_MEMORY", 10)
        return _prepared(file, filter="at_start", **data)  # type: ignore[arg-type]


def test_measured_tasks_are_those_that_encoding_all_in_memory_would_keep(tmp_path: Path) -> None:
    file = _file(tmp_path, long_every=10)
    in_memory = _prepared(file, filter="at_start", held_out_fraction=0).source
    measured = _measured(file, held_out_fraction=0).source
    assert measured.num_tasks == in_memory.num_tasks == 180
    texts = [{issue.task.prompt_text for _ in range(180) if (issue := one.next())} for one in (in_memory, measured)]
    assert texts[0] == texts[1]


def test_auto_measures_up_to_a_bound_and_is_lazy_beyond(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B113: nothing is rendered at the start."""
    file = _file(tmp_path, long_every=10)
    assert _prepared(file, held_out_fraction=0).source.num_tasks == 180
    monkeypatch.setattr(prompts_module, "MAX_ROWS_IN_MEMORY", 199)
    assert _prepared(file, held_out_fraction=0).source.num_tasks == 200


def test_when_every_row_is_too_long_the_message_has_counts_and_limits(tmp_path: Path) -> None:
    """B114"""
    file = _file(tmp_path, long_every=1)
    with pytest.raises(DataError, match=r"200 rows, 0 left .* beyond 20 tokens \(the longest has 4[0-9]\)"):
        _measured(file)
    with pytest.raises(DataError, match="all 200 rows of an epoch were left out"):
        _prepared(file, filter="lazy", held_out_fraction=0).source.next()


def test_lengths_are_measured_by_processes_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_module, "ROWS_PER_JOB", 60)
    model_dir = write_tiny_tokenizer(tmp_path / "model")
    codec = load_codec(str(model_dir), trust_remote_code=False)
    data = DataSettings(source=str(_file(tmp_path, bad=3)), cache_dir=tmp_path / "cache", filter_processes=2)
    rows, model = open_rows(data), Model(directory=str(model_dir))
    apart = measure(rows, data, codec, model, cache_dir=tmp_path / "cache")
    here = measure(rows, data, codec, None, cache_dir=tmp_path / "cache")
    assert np.array_equal(apart.lengths, here.lengths)
    assert np.array_equal(apart.prompts, here.prompts)
    assert apart.lengths[3] == BAD
    assert apart.problems == here.problems
    monkeypatch.setattr(measure_module, "_in_processes", None)
    again = measure(rows, data, codec, model, cache_dir=tmp_path / "cache")
    assert np.array_equal(again.lengths, here.lengths)
    assert again.problems == here.problems


@pytest.mark.parametrize("count", [200, 100], ids=["as many", "fewer"])
def test_lengths_of_a_file_that_was_replaced_while_they_were_measured_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Each process that measures opens the file by itself."""
    monkeypatch.setattr(measure_module, "ROWS_PER_JOB", 60)
    model_dir = write_tiny_tokenizer(tmp_path / "model")
    codec = load_codec(str(model_dir), trust_remote_code=False)
    data = DataSettings(source=str(_file(tmp_path)), cache_dir=tmp_path / "cache", filter_processes=2)
    rows = open_rows(data)
    (tmp_path / "other").mkdir()
    _file(tmp_path / "other", count, long_every=3).replace(tmp_path / "rows.jsonl")
    with pytest.raises(DataChanged, match="was changed while its prompts were measured"):
        measure(rows, data, codec, Model(directory=str(model_dir)), cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache" / "lengths").exists()


def test_broken_cache_is_measured_again_and_one_that_cannot_be_written_does_without(tmp_path: Path) -> None:
    model_dir = write_tiny_tokenizer(tmp_path / "model")
    codec = load_codec(str(model_dir), trust_remote_code=False)
    data = DataSettings(source=str(_file(tmp_path, 20)), filter_processes=1)
    rows, model = open_rows(data), Model(directory=str(model_dir))
    good = measure(rows, data, codec, model, cache_dir=tmp_path / "cache")
    (kept,) = (tmp_path / "cache" / "lengths").iterdir()
    kept.write_bytes(kept.read_bytes()[:40])
    assert np.array_equal(measure(rows, data, codec, model, cache_dir=tmp_path / "cache").lengths, good.lengths)
    (tmp_path / "file").write_text("")
    assert np.array_equal(measure(rows, data, codec, model, cache_dir=tmp_path / "file").lengths, good.lengths)


@pytest.mark.parametrize("as_messages", [False, True])
@pytest.mark.parametrize(
    ("on_overlong", "sizes"),
    [("drop", [4095, 4096]), ("left", [4095, 4096, 4096, 4096]), ("right", [4095, 4096, 4096, 4096])],
)
def test_no_prompt_that_goes_to_the_engine_is_longer_than_its_limit(
    on_overlong: str, sizes: list[int], as_messages: bool
) -> None:
    """B112: counted on the ids, those of the template included."""
    limits = Limits(max_prompt_tokens=4096, on_overlong=OnOverlong(on_overlong))
    found: list[int] = []
    for wanted in (4095, 4096, 4097, 40_000):
        template = CODEC.encode_prompt(({"role": "user", "content": ""},))[1].size if as_messages else 0
        text = "1" + "2" * (wanted - template - 2) + "3"
        prompt = ({"role": "user", "content": text},) if as_messages else text
        task = task_of(Row(prompt=prompt, ground_truth="x", data_source="d"), CODEC, limits)
        if isinstance(task, Refusal):
            assert task is Refusal.OVERLONG
            continue
        found.append(task.prompt_ids.size)
        if wanted > 4096:
            assert ("1" in task.prompt_text, "3" in task.prompt_text) == (
                (False, True) if on_overlong == "left" else (True, False)
            )
    assert found == sizes


def test_prompt_that_is_too_long_stops_the_run_where_that_is_an_error(tmp_path: Path) -> None:
    """B112"""
    file = _file(tmp_path, long_every=150)
    with pytest.raises(DataError, match=r"data row 1: prompt: got 4[0-9] tokens, expected at most 20"):
        _prepared(file, on_overlong="error")


@given(st.floats(0, 0.99), st.integers(0, 9), st.lists(st.integers(0, 2**64 - 1), max_size=30))
def test_split_by_hash_is_the_same_each_time_and_nothing_is_held_out_at_zero(
    fraction: float, seed: int, hashes: list[int]
) -> None:
    sides = [[Hashed(fraction=fraction, seed=seed).holds_out(one) for one in hashes] for _ in range(2)]
    assert sides[0] == sides[1]
    assert not any(Hashed(fraction=0, seed=seed).holds_out(one) for one in hashes)


def test_what_is_made_ahead_is_what_is_asked_for(tmp_path: Path) -> None:
    data = DataSettings(source=str(_file(tmp_path)))
    rows = open_rows(data)
    limits, split = Limits(max_prompt_tokens=20), Hashed(fraction=0, seed=0)
    table, plain = LazyTasks(rows, CODEC, limits, split), LazyTasks(rows, CODEC, limits, split)
    table.expect(range(200))
    for position in (199, 0, 57):
        ahead, asked = table.at(position), plain.at(position)
        assert not isinstance(ahead, Refusal)
        assert not isinstance(asked, Refusal)
        assert (ahead.task_id, ahead.prompt_text) == (asked.task_id, asked.prompt_text)
    table.close()


def by_length(tasks: list[object], epoch: int, seed: int) -> list[int]:
    """A curriculum: the short ones first."""
    return sorted(range(len(tasks)), key=lambda at: (tasks[at].prompt_ids.size, at))  # type: ignore[attr-defined]


def test_curriculum_by_dotted_path_orders_the_tasks(tmp_path: Path) -> None:
    source = _prepared(_file(tmp_path), curriculum=f"{__name__}:by_length", held_out_fraction=0).source
    lengths = [issue.task.prompt_ids.size for _ in range(200) if (issue := source.next())]
    assert lengths == sorted(lengths)
    with pytest.raises(DataError, match=r"data\.curriculum: got 'no\.such:thing'"):
        _prepared(tmp_path / "rows.jsonl", curriculum="no.such:thing")


@pytest.mark.parametrize("filter_", ["at_start", "lazy"])
def test_weighted_sources_come_as_often_as_their_weights_say(tmp_path: Path, filter_: str) -> None:
    for name, count in (("a", 30), ("b", 10)):
        rows = [{"prompt": f"{n}+1=", "ground_truth": "x", "data_source": name} for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
    data = DataSettings.model_validate({"source": sources, "weights": [0.5, 3], "filter": filter_, "held_out_fraction": 0})
    source = prepare(open_rows(data), data, CODEC, seed=1, max_prompt_tokens=20).source
    assert source.num_tasks == 45
    ids = _ids(source, 90)
    counts = {task_id: ids.count(task_id) for task_id in ids}
    assert sorted(counts.values()) == [1] * 30 + [6] * 10
    assert {count for task_id, count in counts.items() if task_id.startswith("b/")} == {6}


def test_a_row_is_at_hand_once_the_thread_has_made_it(tmp_path: Path) -> None:
    rows = open_rows(DataSettings(source=str(_file(tmp_path, 20, long_every=4, bad=7))))
    table = LazyTasks(rows, CODEC, Limits(max_prompt_tokens=20, on_overlong=OnOverlong.DROP), Hashed(fraction=0, seed=1))
    told = [threading.Event() for _ in range(20)]
    assert not any(table.at_hand(position, told[position].set) for position in range(20))
    assert not table.at_hand(19, told[19].set)
    assert all(event.wait(30) for event in told)
    assert all(table.at_hand(position, told[position].clear) for position in range(20))
    assert all(event.is_set() for event in told)
    assert table.at(4) is Refusal.OVERLONG
    assert table.at(7) is Refusal.BAD_ROW
    assert isinstance(table.at(5), Task)
    table.close()


def test_what_making_a_row_raises_is_raised_to_everybody_who_asks_for_it(tmp_path: Path) -> None:
    rows = open_rows(DataSettings(source=str(_file(tmp_path, 8, long_every=4))))
    table = LazyTasks(rows, CODEC, Limits(max_prompt_tokens=20, on_overlong=OnOverlong.ERROR), Hashed(fraction=0, seed=1))
    told = threading.Event()
    assert not table.at_hand(4, told.set)
    assert told.wait(30)
    for _ in range(2):
        assert table.at_hand(4, told.clear)
        with pytest.raises(DataError, match="expected at most 20"):
            table.at(4)
    table.close()
