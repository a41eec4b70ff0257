"""Rewards of a batch by group, for families that compare the rollouts of a prompt."""

from collections.abc import Mapping, Sequence

from atoll.families.refusals import sample_refused
from atoll.families.rows import Row


def rewards_by_group(rows: Sequence[Row]) -> Mapping[str, Mapping[str, float]]:
    """Group id -> rollout id -> reward; a rollout of several rows counts once.

    Raises: InvalidInput when the rows of a rollout disagree.
    """
    groups: dict[str, dict[str, float]] = {}
    for row in rows:
        reward = groups.setdefault(row.group_id, {}).setdefault(row.rollout_id, row.reward)
        if reward != row.reward:
            raise sample_refused(
                row.sample_id,
                f"reward {row.reward} differs from {reward} in another row of its rollout {row.rollout_id}",
                field="reward",
            )
    return groups
