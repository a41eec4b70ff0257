"""SDPO: the student learns to answer as it answers with a correct attempt of its own in front of it."""

from atoll.families.sdpo.spec import SdpoFamily, SdpoOptions

__all__ = ["SdpoFamily", "SdpoOptions"]
