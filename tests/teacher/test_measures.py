import numpy as np
import pytest
from atoll.teacher.measures import Measures
from atoll.teacher.sequences import Sequence

ONE = Sequence("a", np.zeros(60, np.int32), np.zeros(40, np.int32), 0)


def test_the_rate_is_that_of_the_last_minute_or_since_start() -> None:
    now = 0.0
    measures = Measures(lambda: now)
    now = 10.0
    measures.scored(ONE, queued_s=1.0, engine_s=2.0)
    assert measures.tokens_per_second == pytest.approx(10.0)
    now = 65.0
    measures.scored(ONE, queued_s=2.0, engine_s=4.0)
    assert measures.tokens_per_second == pytest.approx(200 / 60)
    now = 71.0
    assert measures.tokens_per_second == pytest.approx(100 / 60)
    now = 200.0
    assert measures.tokens_per_second == 0.0
    assert (measures.sequences, measures.response_tokens) == (2, 80)
    assert (measures.mean_queue_seconds, measures.mean_engine_seconds) == (1.5, 3.0)


def test_nothing_measured_is_zero() -> None:
    measures = Measures()
    assert (measures.tokens_per_second, measures.mean_queue_seconds, measures.mean_engine_seconds) == (0.0, 0.0, 0.0)
