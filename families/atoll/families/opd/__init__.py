"""On-policy distillation: another model corrects the student's own samples, token by token."""

from atoll.families.opd.spec import OpdFamily, OpdOptions

__all__ = ["OpdFamily", "OpdOptions"]
