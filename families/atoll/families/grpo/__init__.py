"""GRPO: rollouts of one prompt are compared with each other; PPO's clipped loss, no critic. The control family."""

from atoll.families.grpo.spec import GrpoFamily, GrpoOptions

__all__ = ["GrpoFamily", "GrpoOptions"]
