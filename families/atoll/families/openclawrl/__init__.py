"""OpenClaw-RL: a turn's reward by reinforcement, and what should have been said by distillation from a hinted base."""

from atoll.families.openclawrl.spec import OpenClawRlFamily, OpenClawRlOptions

__all__ = ["OpenClawRlFamily", "OpenClawRlOptions"]
