"""The example is what a user would write: its settings are valid, its rows load, its reward scores."""

from __future__ import annotations

from pathlib import Path

from agent_loop.rewards import load_reward
from configs.loader import load
from rollouter.tasks import load_rows

CONFIG = Path(__file__).resolve().parents[2] / "examples" / "uppercase" / "run.yaml"


async def test_rows_and_reward_are_found_by_the_paths_in_the_settings() -> None:
    settings = load(CONFIG, environment={})
    rows = load_rows(settings.data.source)
    assert len(rows) >= settings.samples_per_step // settings.group_size
    row = next(row for row in rows if row.ground_truth == "TIGER")
    reward = load_reward(settings.data.reward)
    scores = [
        await reward.score(data_source=row.data_source, solution_str=text, ground_truth=row.ground_truth, extra_info={})
        for text in ("TIGER\n", "TIGRE\n", "x\n")
    ]
    assert [score.value for score in scores] == [1.0, 0.3, 0.0]
