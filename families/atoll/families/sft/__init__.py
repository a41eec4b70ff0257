"""Supervised fine-tuning: the likelihood of reported replies goes up. No reward, no advantages."""

from atoll.families.sft.spec import SftFamily, SftOptions

__all__ = ["SftFamily", "SftOptions"]
