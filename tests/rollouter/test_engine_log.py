"""The one line of an engine's log that says what went wrong."""

from __future__ import annotations

from pathlib import Path

from rollouter.engine_log import failure_line, last_line, tail

CRASH = """\
(APIServer pid=7) INFO 11-30 18:06:42 [api_utils.py:286] non-default args: {'model': 'x'}
(EngineCore pid=9) ERROR 11-30 18:06:44 [core.py:1010] EngineCore failed to start.
(EngineCore pid=9) ERROR 11-30 18:06:44 [core.py:1010] Traceback (most recent call last):
(EngineCore pid=9) ERROR 11-30 18:06:44 [core.py:1010]   File "/x/core.py", line 12, in run
(EngineCore pid=9) ERROR 11-30 18:06:44 [core.py:1010] ValueError: Available memory is less than requested memory for kv
(APIServer pid=7)   File "/x/entry.py", line 3, in main
(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def test_the_root_cause_is_quoted_and_not_what_points_at_it() -> None:
    assert failure_line(CRASH) == "ValueError: Available memory is less than requested memory for kv"


def test_without_an_exception_the_last_line_is_quoted() -> None:
    assert failure_line("one\n(EngineCore pid=9) INFO 11-30 18:06:44 [core.py:10] Loading weights\n\n") == "Loading weights"


def test_an_empty_log_says_that_it_is_empty() -> None:
    assert last_line(" \n") == "(nothing was logged)"


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text("a" * 1000 + "end")
    assert tail(file, max_bytes=10) == "aaaaaaaend"
    assert tail(tmp_path / "none") == ""
