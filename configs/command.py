"""The command line that both daemons share: `--config`, `key=value`, `--help` with every setting, `--dry-run`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from configs.errors import ConfigError
from configs.gpu import visible_gpus
from configs.keys import listing
from configs.loader import load
from configs.schema import Settings
from configs.unused import unused

SETTINGS_FILE = "settings.yaml"


def parse(argv: Sequence[str], *, prog: str, description: str) -> Settings:
    """Settings for a daemon.

    Exits: 0 after `--help` or `--dry-run`, 2 with one line per problem on stderr when a setting or argument is wrong.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog="settings (defaults < --config < environment HEADRACE__SECTION__KEY < arguments):\n" + listing(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, help="YAML file of settings")
    parser.add_argument("--dry-run", action="store_true", help="validate, print the resolved settings and stop")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the file")
    arguments = parser.parse_args(argv)
    try:
        settings = load(arguments.config, arguments.overrides)
    except ConfigError as error:
        for line in str(error).splitlines():
            sys.stderr.write(f"{prog}: error: {line}\n")
        raise SystemExit(2) from None
    if arguments.dry_run:
        sys.stdout.write(as_yaml(settings, notes=unused(settings, on_gpu=bool(visible_gpus()))))
        raise SystemExit(0)
    return settings


def remember(settings: Settings) -> None:
    """Write the resolved settings into the run directory, where `headrace status` and `set` look for the address."""
    (settings.run_dir / SETTINGS_FILE).write_text(as_yaml(settings), encoding="utf-8")


def as_yaml(settings: Settings, *, notes: Mapping[str, str] | None = None) -> str:
    """The resolved settings as YAML that loads back to the same; a key in `notes` is marked as not used, with the reason."""
    lines, section = [], ""
    for line in yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=1000).splitlines():
        name = line.strip().partition(":")[0]
        if not line.startswith((" ", "-")):
            section = name if line.endswith(":") else ""
        key = f"{section}.{name}" if line.startswith(" ") and section else name
        note = (notes or {}).get(key)
        lines.append(f"{line}  # not used: {note}" if note else line)
    return "\n".join(lines) + "\n"
