"""TTT-Discover: a grid of rollouts searches for the best solution; entropic advantages favour a group's best."""

from atoll.families.tttd.spec import TttdFamily, TttdOptions

__all__ = ["TttdFamily", "TttdOptions"]
