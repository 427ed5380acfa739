"""The size of a batch may change at any moment, and no change of it lets the run stand still."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from rollouter.admission import Conditions
from trainer.batch_size import BatchSize

GROUP_SIZE = 2


def test_a_batch_has_the_size_in_force() -> None:
    size = BatchSize(2)
    assert size.choose(2, ready=1, is_full=False) is None
    assert size.choose(2, ready=5, is_full=False) == 2
    assert size.choose(1, ready=1, is_full=False) == 1
    assert size.choose(4, ready=3, is_full=False) is None
    assert size.choose(4, ready=4, is_full=False) == 4


def test_a_full_bus_gives_batches_of_the_size_that_was_raised_until_one_is_whole() -> None:
    size = BatchSize(2)
    size.note(8)
    assert size.is_raised(8)
    assert size.choose(8, ready=3, is_full=True) == 2
    assert size.choose(8, ready=1, is_full=True) is None
    assert size.choose(8, ready=8, is_full=True) == 8
    assert not size.is_raised(8)
    assert size.choose(8, ready=7, is_full=True) is None, "under the new size admission keeps room for it"


class World:
    """Rollouts of groups of two on their way to a bus of limited room, and a trainer that takes batches from it."""

    def __init__(self, *, room: int, groups: int, draw: random.Random) -> None:
        self.room = room
        self.groups = groups
        self.size = BatchSize(groups)
        self.draw = draw
        self.flying: list[int] = []
        """Group of each rollout in flight."""
        self.held: dict[int, int] = {}
        """Group to its records on the bus."""
        self.num_groups = 0

    @property
    def ready(self) -> list[int]:
        return [group for group, count in self.held.items() if count == GROUP_SIZE]

    @property
    def is_full(self) -> bool:
        return sum(self.held.values()) >= self.room

    def admit(self) -> bool:
        open_groups = set(self.flying)
        conditions = Conditions(
            group_size=GROUP_SIZE,
            staleness_threshold=1e6,
            samples_per_period=self.groups * GROUP_SIZE,
            max_concurrent_rollouts=10**6,
            max_staleness=None,
            num_samples_needed=None,
            num_in_flight=len(self.flying),
            num_unsettled=len(self.flying) + sum(self.held.values()),
            num_open_seats=GROUP_SIZE * len(open_groups),
            samples_per_step=self.groups * GROUP_SIZE,
            max_queued_samples=self.room,
            journal_blocked=False,
            evaluating=False,
            draining=False,
        )
        if not conditions.bus_has_room:
            return False
        self.flying += [self.num_groups] * GROUP_SIZE
        self.num_groups += 1
        return True

    def arrive(self) -> bool:
        if not self.flying or self.is_full:
            return False
        group = self.flying.pop(self.draw.randrange(len(self.flying)))
        self.held[group] = self.held.get(group, 0) + 1
        return True

    def take(self) -> bool:
        count = self.size.choose(self.groups, ready=len(self.ready), is_full=self.is_full)
        if count is None:
            return False
        for group in self.ready[:count]:
            del self.held[group]
        return True

    def resize(self, groups: int) -> None:
        self.groups = groups
        self.size.note(groups)


@given(st.integers(4, 12), st.data())
def test_no_change_of_the_size_at_any_moment_lets_the_run_stand_still(room_groups: int, data: st.DataObject) -> None:
    """B28 for the size of a step: raised while the bus is full of what the smaller one let start."""
    world = World(
        room=room_groups * GROUP_SIZE,
        groups=data.draw(st.integers(1, room_groups)),
        draw=random.Random(data.draw(st.integers(0, 10**6))),
    )
    for _ in range(data.draw(st.integers(0, 60))):
        move = data.draw(st.sampled_from(["admit", "admit", "arrive", "arrive", "take", "resize"]))
        if move == "resize":
            world.resize(data.draw(st.integers(1, room_groups)))
        else:
            getattr(world, move)()
    for _ in range(10 * room_groups):
        while world.arrive():
            pass
        assert world.take() or world.admit() or not world.flying, "nothing can arrive, be taken, or start"
