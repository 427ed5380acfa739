"""Command `headrace`: start a run, look at it, change it.

Exit codes: 0 done, 1 the world said no (a run failed, nobody answers), 2 the user is wrong, 128 + signal when stopped.
Whatever is heavy is imported by the command that needs it.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from console.change import How
    from console.run_dirs import LiveRun

_TIMEOUT_S = 5.0
_CHECK_TIMEOUT_S = 60.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = _parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a sign is no reason to end a run
    try:
        return int(arguments.run(arguments))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _up(arguments: argparse.Namespace) -> int:
    from console.launch import up

    return up(arguments.config, arguments.overrides, plain=arguments.plain)


def _status(arguments: argparse.Namespace) -> int:
    from console.bias import bias
    from console.status import status

    tell = bias if arguments.bias else status
    return _with_run(
        arguments,
        lambda run: tell(run, as_json=arguments.json, timeout_s=arguments.timeout_s),
        name="status",
    )


def _set(arguments: argparse.Namespace) -> int:
    from configs.errors import ConfigError
    from console.change import change, parse

    try:
        parse(arguments.assignments)
    except ConfigError as error:
        return _refuse("set", error, 2)
    return _with_run(arguments, lambda run: change(run.bus, run.address, arguments.assignments, _how(arguments)), name="set")


def _revert(arguments: argparse.Namespace) -> int:
    from console.change import revert

    return _with_run(arguments, lambda run: revert(run.bus, run.address, arguments.revision, _how(arguments)), name="revert")


def _how(arguments: argparse.Namespace) -> How:
    from console.change import How

    return How(
        author=arguments.author,
        expected_revision=arguments.expect,
        dry_run=arguments.dry_run,
        timeout_s=arguments.timeout_s,
    )


def _history(arguments: argparse.Namespace) -> int:
    from console.history import history_at, history_of

    if arguments.address is not None:
        return _with_run(
            arguments,
            lambda run: history_at(run.bus, run.address, as_json=arguments.json, timeout_s=arguments.timeout_s),
            name="history",
        )
    return _in_run_dir(arguments, lambda run_dir: history_of(run_dir, as_json=arguments.json), name="history")


def _ledger(arguments: argparse.Namespace) -> int:
    from console.ledger import ledger

    return _in_run_dir(
        arguments, lambda run_dir: ledger(run_dir, as_json=arguments.json, sample=arguments.sample), name="ledger"
    )


def _quarantine_list(arguments: argparse.Namespace) -> int:
    from console.quarantine import list_held

    return _in_run_dir(arguments, list_held, name="quarantine list")


def _quarantine_show(arguments: argparse.Namespace) -> int:
    from console.quarantine import show

    return _in_run_dir(arguments, lambda run_dir: show(run_dir, arguments.id), name="quarantine show")


def _quarantine_release(arguments: argparse.Namespace) -> int:
    from configs.errors import ConfigError
    from console.quarantine import release

    if bool(arguments.ids) == arguments.all:
        return _refuse("quarantine release", ConfigError("expected ids, or --all"), 2)
    return _in_run_dir(
        arguments, lambda run_dir: release(run_dir, arguments.ids, everything=arguments.all), name="quarantine release"
    )


def _weights_check(arguments: argparse.Namespace) -> int:
    from console.weights import check

    return _with_run(
        arguments,
        lambda run: check(run, effective=not arguments.checksums_only, as_json=arguments.json, timeout_s=arguments.timeout_s),
        name="weights check",
    )


def _data_check(arguments: argparse.Namespace) -> int:
    from configs.errors import ConfigError
    from configs.logs import set_up
    from configs.schema import LoggingSettings
    from console.data_check import data_check

    set_up(LoggingSettings(level="error"), daemon="headrace")
    files = [one for one in arguments.files if not _is_override(one)]
    try:
        return data_check(
            files,
            config=arguments.config,
            tokenizer=arguments.tokenizer,
            overrides=[one for one in arguments.files if _is_override(one)],
            as_json=arguments.json,
        )
    except ConfigError as error:
        return _refuse("data check", error, 2)


def _is_override(text: str) -> bool:
    """Whether it is `section.key=value` and no source."""
    key, equals, _ = text.partition("=")
    return bool(equals) and all(part.isidentifier() for part in key.split(".")) and not Path(text).exists()


def _settings(arguments: argparse.Namespace) -> int:
    from configs.keys import listing

    sys.stdout.write(listing() + "\n")
    return 0


def _new_keys(arguments: argparse.Namespace) -> int:
    from configs.errors import ConfigError
    from console.errors import ConsoleError
    from console.key_files import new_client, new_keys
    from sample_bus.errors import BusError

    try:
        if arguments.client is None:
            text = new_keys(arguments.directory)
        else:
            text = new_client(arguments.directory, arguments.client)
    except ConfigError as error:
        return _refuse("keys new", error, 2)
    except (ConsoleError, BusError) as error:
        return _refuse("keys new", error, 1)
    sys.stdout.write(text)
    return 0


def _with_run(arguments: argparse.Namespace, command: Callable[[LiveRun], int], *, name: str) -> int:
    """Run a command that speaks with a run."""
    from configs.errors import ConfigError
    from configs.logs import set_up
    from configs.schema import LoggingSettings
    from console.errors import ConsoleError
    from sample_bus.errors import BusError

    set_up(LoggingSettings(level="error"), daemon="headrace")
    try:
        return command(_live_run(arguments))
    except ConfigError as error:
        return _refuse(name, error, 2)
    except (ConsoleError, BusError) as error:
        return _refuse(name, error, 1)


def _in_run_dir(arguments: argparse.Namespace, command: Callable[[Path], int], *, name: str) -> int:
    """Run a command that reads the directory of a run, which may be over."""
    from configs.errors import ConfigError
    from configs.loader import load
    from configs.logs import set_up
    from configs.schema import LoggingSettings
    from console.errors import ConsoleError
    from console.run_dirs import newest, newest_of
    from sample_bus.errors import BusError

    set_up(LoggingSettings(level="error"), daemon="headrace")
    try:
        if arguments.run_dir is not None:
            return command(arguments.run_dir)
        return command(newest_of(load(arguments.config)) if arguments.config is not None else newest())
    except ConfigError as error:
        return _refuse(name, error, 2)
    except (ConsoleError, BusError) as error:
        return _refuse(name, error, 1)


def _live_run(arguments: argparse.Namespace) -> LiveRun:
    from configs.errors import ConfigError
    from configs.loader import load
    from configs.paths import bus_address
    from console.run_dirs import LiveRun, bus_at, bus_of, live_of, newest_live

    if arguments.keys_dir and not arguments.address:
        raise ConfigError("--keys-dir goes with --address only: a run's own settings say where its keys lie")
    if arguments.address:
        return LiveRun(*bus_at(arguments.address, keys_dir=arguments.keys_dir), None)
    if arguments.config and not arguments.run_dir:
        settings = load(arguments.config)
        run_dir = live_of(settings)
        if run_dir is None:
            return LiveRun(settings.bus, bus_address(settings), None)
    else:
        run_dir = arguments.run_dir or newest_live()
    return LiveRun(*bus_of(run_dir), run_dir)


def _refuse(name: str, error: Exception, exit_code: int) -> int:
    sys.stderr.writelines(f"headrace {name}: error: {line}\n" for line in str(error).splitlines())
    return exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headrace",
        description="Asynchronous reinforcement learning for language models: start a run, look at it, change it.",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    up = commands.add_parser("up", help="start trainer and rollouter here and show the run until it ends")
    up.add_argument("--config", type=Path, help="YAML file of settings")
    up.add_argument("--plain", action="store_true", help="plain lines even on a terminal")
    up.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the file: `headrace settings`")
    up.set_defaults(run=_up)

    status = commands.add_parser("status", help="show the state of a run")
    _choose_run(status)
    status.add_argument("--json", action="store_true", help="every topic as JSON")
    status.add_argument(
        "--bias", action="store_true", help="what was trained against what was weighted down or dropped for its age"
    )
    status.set_defaults(run=_status)

    change = commands.add_parser("set", help="change live settings of a run")
    change.add_argument(
        "assignments", nargs="+", metavar="key=value", help="live settings: those so marked by `headrace settings`"
    )
    _add_how(change)
    change.set_defaults(run=_set)

    revert = commands.add_parser("revert", help="go back to the live settings of an earlier revision, as a new revision")
    revert.add_argument(
        "revision", type=int, metavar="REVISION", help="as `headrace history` numbers them; 0: before the first"
    )
    _add_how(revert)
    revert.set_defaults(run=_revert)

    history = commands.add_parser("history", help="every change of live settings: when, by whom, from when it holds")
    _choose_run(history)
    history.add_argument("--json", action="store_true", help="as JSON")
    history.set_defaults(run=_history)

    ledger = commands.add_parser("ledger", help="prove that no rollout of a run was lost or trained twice; exit code 1 if not")
    _choose_run_dir(ledger)
    ledger.add_argument("--json", action="store_true", help="as JSON")
    ledger.add_argument(
        "--sample",
        metavar="ID",
        help="tell one story: of GROUP/SEAT, a group, ids that begin so, or PRODUCER/EPOCH/SEQ",
    )
    ledger.set_defaults(run=_ledger)

    quarantine = commands.add_parser("quarantine", help="tasks that failed too often, and messages that did not decode")
    _add_quarantine(quarantine)

    weights = commands.add_parser("weights", help="whether the engines hold the trainer's weights")
    checks = weights.add_subparsers(title="commands", required=True, metavar="COMMAND")
    weights_check = checks.add_parser(
        "check",
        help="compare checksums of every tensor on every engine with the trainer's, and what the engines compute with; exit "
        "code 1 if one differs",
    )
    _choose_run(weights_check, timeout_s=_CHECK_TIMEOUT_S)
    weights_check.add_argument("--json", action="store_true", help="as JSON")
    weights_check.add_argument(
        "--checksums-only",
        action="store_true",
        help="do not read back what the engines compute with, which holds each up for about a forward pass",
    )
    weights_check.set_defaults(run=_weights_check)

    data = commands.add_parser("data", help="look at data before a run is started over it")
    data_kinds = data.add_subparsers(title="commands", required=True, metavar="COMMAND")
    check = data_kinds.add_parser("check", help="every problem by row and column; exit code 1 if a run would refuse it")
    check.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="sources as in data.source; none: those of the settings. key=value: settings that win over the file",
    )
    check.add_argument("--config", type=Path, help="YAML file of settings: column names, limits")
    check.add_argument("--tokenizer", metavar="DIR", help="a model's directory: prompts are rendered and measured with it")
    check.add_argument("--json", action="store_true", help="as JSON")
    check.set_defaults(run=_data_check)

    settings = commands.add_parser("settings", help="list every setting: type, default, whether it may change live, meaning")
    settings.set_defaults(run=_settings)

    keys = commands.add_parser("keys", help="keys for a bus over TCP")
    kinds = keys.add_subparsers(title="commands", required=True, metavar="COMMAND")
    new = kinds.add_parser("new", help="make the trainer's keys, or those of one more client")
    new.add_argument("directory", type=Path, metavar="DIR", help="directory of the keys: bus.keys_dir of the trainer")
    new.add_argument("--client", metavar="NAME", help="allow one more client and make DIR/for-NAME, to be moved to its host")
    new.set_defaults(run=_new_keys)
    return parser


def _add_quarantine(quarantine: argparse.ArgumentParser) -> None:
    kinds = quarantine.add_subparsers(title="commands", required=True, metavar="COMMAND")
    listing = kinds.add_parser("list", help="a line for each of them")
    _choose_run_dir(listing)
    listing.set_defaults(run=_quarantine_list)
    show = kinds.add_parser("show", help="everything about one of them")
    show.add_argument("id", metavar="ID", help="as `list` names it; for a task its own id too")
    _choose_run_dir(show)
    show.set_defaults(run=_quarantine_show)
    release = kinds.add_parser("release", help="let a task be issued again, also on a run that goes on; remove a message")
    release.add_argument("ids", nargs="*", metavar="ID", help="as `list` names it; for a task its own id too")
    release.add_argument("--all", action="store_true", help="all of them")
    _choose_run_dir(release)
    release.set_defaults(run=_quarantine_release)


def _add_how(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--author", help="who changes it; default: user@host")
    parser.add_argument("--expect", type=int, metavar="REVISION", help="refuse if the settings have moved from this revision")
    parser.add_argument("--dry-run", action="store_true", help="only say what would change; the trainer checks it as if it did")
    _choose_run(parser)


def _choose_run_dir(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--run-dir", type=Path, help="directory of the run; default: the newest below ./runs, over or not")
    which.add_argument("--config", type=Path, help="settings file of the run")


def _choose_run(parser: argparse.ArgumentParser, *, timeout_s: float = _TIMEOUT_S) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--run-dir", type=Path, help="directory of the run; default: the newest below ./runs that goes on")
    which.add_argument("--config", type=Path, help="settings file of the run")
    which.add_argument("--address", help="bus address of the run: ipc://PATH, tcp://HOST:PORT or redis://HOST:PORT/DB#RUN")
    parser.add_argument("--keys-dir", type=Path, help="with --address: directory of the client's keys (bus.keys_dir)")
    parser.add_argument("--timeout-s", type=float, default=timeout_s, help="deadline for the trainer's answer")


if __name__ == "__main__":
    sys.exit(main())
