"""The report of openclawrl: a judgement of one turn, and prompts that would have led to a better one.

```
metadata.hint_candidates: [[151644, 872, ...], ...]   each the token ids [P'] of the turn's prompt with a hint in it
```
"""

from dataclasses import dataclass

import numpy as np
from atoll.families.batching import ReportView
from atoll.families.refusals import report_refused
from atoll.families.rows import Int32
from atoll.families.singleton import Singleton

CANDIDATES = "hint_candidates"
MAX_CANDIDATES = 64
MAX_ID = 2**31 - 1
REWARDS = (-1.0, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class JudgedTurns(Singleton):
    """A report is one sample with the score +1, -1 or 0, and optionally hinted prompts."""

    def validate(self, report: ReportView) -> None:
        """Wants one receipt, a score of REWARDS and candidates that are lists of token ids, where there are any."""
        # Not super(): a dataclass with slots is another class than the one this method was written in.
        Singleton.validate(self, report)
        if report.score not in REWARDS:
            raise report_refused(f"score: 1, -1 or 0 expected, got {report.score}", field="score")
        hinted_prompts(report)


def hinted_prompts(report: ReportView) -> list[Int32]:
    """The prompts [P'] of the candidates, in their order; none where the report has none.

    Raises: InvalidInput (REPORT_REFUSED) naming the candidate.
    """
    given = report.metadata.get(CANDIDATES)
    if given is None:
        return []
    field = f"metadata.{CANDIDATES}"
    if not isinstance(given, list) or len(given) > MAX_CANDIDATES:
        got = f"{len(given)} of them" if isinstance(given, list) else repr(given)
        raise report_refused(f"{field}: a list of at most {MAX_CANDIDATES} prompts expected, got {got}", field=field)
    prompts = []
    for number, ids in enumerate(given):
        where = f"{field}[{number}]"
        if not isinstance(ids, list) or not ids:
            raise report_refused(f"{where}: a list of at least one token id expected, got {ids!r}", field=where)
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token <= MAX_ID:
                raise report_refused(f"{where}: token ids from 0 up expected, got {token!r}", field=where)
        prompts.append(np.asarray(ids, dtype=np.int32))
    return prompts
