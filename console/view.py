"""A run as a live view on a terminal."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from console.picture import Phase, Picture
from console.plot import chart, moving_mean
from console.words import (
    duration,
    engine_text,
    evaluation_text,
    failure_text,
    number,
    rollouter_text,
    share_percents,
    trainer_text,
)

_BAR = 30
_MAX_FAILURES = 3
"""Reasons that are shown, the newest ones."""
_STYLES = {"training": "green", "waiting": "yellow", "publishing": "magenta", "saving": "blue", "other": "bright_black"}


class LiveDisplay:
    """Redraws in place, on change and at least once a second."""

    refresh_interval_s = 0.5

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=False, vertical_overflow="crop")

    def start(self) -> None:
        self._live.start()

    def show(self, picture: Picture, now: float) -> None:
        self._live.update(
            render(picture, now, width=self._console.width, height=self._console.height, unicode=is_unicode(self._console)),
            refresh=True,
        )

    def close(self) -> None:
        self._live.stop()


def is_unicode(console: Console) -> bool:
    """Whether Braille dots and blocks can be shown."""
    return console.encoding.lower().startswith("utf")


def render(picture: Picture, now: float, *, width: int, height: int, unicode: bool = True) -> RenderableType:
    """The whole view. `width` and `height` are the terminal's, in characters."""
    engines = picture.rollouter.engines if picture.rollouter else ()
    shown = len(engines) + len(picture.evaluations) + 2 * (min(len(picture.failures), _MAX_FAILURES) + len(picture.advice))
    chart_height = min(max(height - 15 - shown, 4), 12)
    return Group(
        _title(picture, now),
        _curve(picture, width=min(width, 120), height=chart_height, unicode=unicode),
        _figures(picture, now, unicode=unicode),
        _footer(picture),
    )


def _footer(picture: Picture) -> Text:
    if Phase.CLOSING in picture.ended_phases:
        return Text("all processes of the run have ended", style="dim")
    if picture.is_stopping:
        return Text("stopping both daemons; Ctrl-C again kills them", style="bold yellow")
    return Text("Ctrl-C stops everything. `headrace set staleness_threshold=1.0` changes the run.", style="dim")


def _title(picture: Picture, now: float) -> Text:
    version = picture.trainer.policy_version if picture.trainer else 0
    step = picture.trainer.step if picture.trainer else 0
    return Text.assemble(
        ("Headrace ", "bold cyan"),
        (picture.name, "bold"),
        f" · step {step}/{picture.num_steps} · policy version {version} · {duration(now - picture.started_at)}",
        no_wrap=True,
        overflow="ellipsis",
    )


def _curve(picture: Picture, *, width: int, height: int, unicode: bool) -> Panel:
    rewards = moving_mean([step.reward_mean for step in picture.history], 3)
    low, high = min([0.0, *rewards]), max([1.0, *rewards])
    lines = chart(rewards, width=max(width - 11, 10), height=height, low=low, high=high, braille=unicode)
    labels = [""] * height
    labels[0], labels[-1] = f"{high:.1f}", f"{low:.1f}"
    body = Text("\n", no_wrap=True).join(
        Text.assemble((f"{label:>4} ", "dim"), (line, "cyan")) for label, line in zip(labels, lines, strict=True)
    )
    now_at = f"reward {picture.history[-1].reward_mean:.3f}" if rewards else "reward: no step yet"
    return Panel(body, title=now_at, title_align="left", width=width, padding=(0, 1))


def _figures(picture: Picture, now: float, *, unicode: bool) -> Table:
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="ellipsis", no_wrap=True)
    last = picture.history[-1] if picture.steps else None
    rates = picture.rates(now)
    generated = picture.rollouter.generated_tokens_per_s if picture.rollouter else 0.0
    rows.add_row("staleness", _staleness(picture))
    rows.add_row(
        "speed",
        f"{number(rates.samples_per_s)} samples/s · {number(rates.trained_tokens_per_s)} trained tokens/s · "
        f"{number(generated)} generated tokens/s",
    )
    rows.add_row("bus", _bus(picture, unicode=unicode))
    rows.add_row("trainer's time", _shares(picture, unicode=unicode))
    if last is not None:
        rows.add_row(
            "last step",
            f"loss {last.loss:.4f} · gradient norm {last.grad_norm:.2f} · learning rate {last.learning_rate:.2e} · "
            f"{duration(last.step_time_s)}",
        )
    for result in picture.evaluations:
        rows.add_row("held-out", evaluation_text(result))
    for words in picture.advice:
        rows.add_row("advice", Text(words, style="yellow", overflow="fold", no_wrap=False))
    for note in picture.failures[-_MAX_FAILURES:]:
        rows.add_row("failures", Text(failure_text(note), style="yellow", overflow="fold", no_wrap=False))
    rows.add_row("trainer", trainer_text(picture))
    rows.add_row("rollouter", rollouter_text(picture))
    for engine in picture.rollouter.engines if picture.rollouter else ():
        rows.add_row(engine.name, engine_text(engine))
    return rows


def _staleness(picture: Picture) -> str:
    threshold = picture.live.values.get("staleness_threshold") if picture.live else None
    bound = f" · threshold {threshold}" if threshold is not None else ""
    if not picture.steps:
        return f"no step yet{bound}"
    last = picture.history[-1]
    return f"mean {last.staleness_mean:.2f} · max {last.staleness_max} (run: {picture.max_staleness}){bound}"


def _bus(picture: Picture, *, unicode: bool) -> str:
    depth, limit = picture.bus_depth, picture.max_queued_samples
    filled = min(_BAR, round(_BAR * depth / limit))
    full, empty = ("█", "░") if unicode else ("#", ".")
    return f"{full * filled}{empty * (_BAR - filled)} {depth} of {limit} samples"


def _shares(picture: Picture, *, unicode: bool) -> Text:
    percents = share_percents(picture.trainer.shares) if picture.trainer else {}
    if not any(percents.values()):
        return Text("not training yet")
    block = "█" if unicode else "#"
    bar = Text()
    for name, percent in percents.items():
        bar.append(block * round(_BAR * percent / 100), style=_STYLES.get(name, ""))
    for name, percent in percents.items():
        if percent:
            bar.append(f"  {name} {percent} %", style=_STYLES.get(name, ""))
    return bar
