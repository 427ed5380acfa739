"""Why a daemon ended, read from its log."""

from __future__ import annotations

from pathlib import Path

import pytest

from console.log_tail import last_error, last_event

TRACEBACK = """Traceback (most recent call last):
  File "a.py", line 3, in <module>
    run()
sample_bus.errors.PeerLost: rollouter r lost, last heartbeat 20.1 s ago
"""

GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "a.py", line 3, in <module>
  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "b.py", line 1, in f
    | ValueError: the real reason
    +------------------------------------
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '{"event":"a","level":"info"}\n{"event":"engine died","level":"error","engine":"engine-0"}\n',
            "engine died engine=engine-0",
        ),
        ('{"event":"bad","level":"error"}\n{"event":"bye","level":"info"}\n', "bad"),
        (
            '{"event":"bad","level":"error"}\n' + TRACEBACK,
            "sample_bus.errors.PeerLost: rollouter r lost, last heartbeat 20.1 s ago",
        ),
        (TRACEBACK + "some library: farewell\n", "sample_bus.errors.PeerLost: rollouter r lost, last heartbeat 20.1 s ago"),
        (GROUP, "ValueError: the real reason"),
        ("trainer: error: argument x: expected key=value\n", "trainer: error: argument x: expected key=value"),
        ("a\nb\nlast words\n\n", "last words"),
        ('{"event":"only","level":"info","step":3}\n', "only step=3"),
    ],
)
def test_the_last_error_is_one_line_that_says_why(tmp_path: Path, text: str, expected: str) -> None:
    log = tmp_path / "x.log"
    log.write_text(text)
    assert last_error(log) == expected


def test_an_exception_of_an_event_is_told(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text('{"event":"trainer failed","level":"error","exception":"Traceback\\n  ...\\nValueError: no"}\n')
    assert last_error(log) == "trainer failed ValueError: no"


def test_a_log_that_is_empty_or_not_there_has_no_error(tmp_path: Path) -> None:
    assert last_error(tmp_path / "none.log") is None
    (tmp_path / "empty.log").touch()
    assert last_error(tmp_path / "empty.log") is None


def test_the_last_event_skips_what_libraries_print(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text('{"event":"converting model","level":"info","percent":40}\nWARNING something\n{"broken json\n')
    assert last_event(log) == "converting model percent=40"


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("x" * (3 << 20) + '\n{"event":"end","level":"error"}\n')
    assert last_error(log) == "end"
