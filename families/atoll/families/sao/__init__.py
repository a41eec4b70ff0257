"""SAO: one scored rollout at a time, asynchronous, against the recorded policy; a critic is the baseline."""

from atoll.families.sao.spec import SaoFamily, SaoOptions

__all__ = ["SaoFamily", "SaoOptions"]
