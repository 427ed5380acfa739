"""A trainer to be killed: `python -m tests.rollouter.fake_trainer ADDRESS RUN_DIR INCARNATION VERSION ON_LOST`.

Asks for an evaluation, publishes one version, then prints a line for each step of samples that it trained and committed and
whose acknowledgement the rollouter has.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from sample_bus.messages import EvaluationResult, RollouterStatus
from tests.rollouter.stand_in import make_settings, stand_in_trainer


async def serve(address: str, run_dir: str, incarnation: str, version: int, on_lost: str) -> None:
    settings = make_settings(Path(run_dir), bus__address=address, bus__on_lost=on_lost)
    async with stand_in_trainer(settings, incarnation=incarnation, origin_version=version) as trainer:
        await trainer.begin()
        await trainer.evaluate(1, version)
        await trainer.publish(version, staged={"engine-0": f"engine-0-{1 if incarnation == 'first' else 2}"})
        trained = 0

        def all_acknowledged(status: RollouterStatus) -> bool:
            return status.counts.offered >= trained

        while True:
            samples = await trainer.train(settings.samples_per_step)
            trained += len(samples)
            await trainer.wait_status(all_acknowledged)
            if trained == len(samples):
                await trainer.wait_report(EvaluationResult)
            versions = sorted({(sample.incarnation, sample.oldest_version) for sample in samples})
            sys.stdout.write(f"trained {len(samples)} {versions}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5]))
