"""SDFT: the student learns to answer as it answers with a demonstration in front of it."""

from atoll.families.sdft.spec import SdftFamily, SdftOptions

__all__ = ["SdftFamily", "SdftOptions"]
