import asyncio

from atoll.teacher.token_budget import TokenBudget


async def test_a_sequence_waits_until_there_are_tokens_for_it() -> None:
    budget = TokenBudget(10)
    await budget.take(7)
    second = asyncio.create_task(budget.take(5))
    await asyncio.sleep(0)
    assert not second.done()
    budget.give_back(7)
    await second
    assert budget.in_flight == 5


async def test_a_short_sequence_does_not_overtake_a_long_one() -> None:
    budget = TokenBudget(10)
    await budget.take(6)
    long, short = asyncio.create_task(budget.take(8)), asyncio.create_task(budget.take(1))
    await asyncio.sleep(0)
    assert not short.done()
    budget.give_back(6)
    await long
    await short
    assert budget.in_flight == 9


async def test_a_sequence_longer_than_the_budget_runs_alone() -> None:
    budget = TokenBudget(10)
    await budget.take(1)
    huge = asyncio.create_task(budget.take(50))
    await asyncio.sleep(0)
    assert not huge.done()
    budget.give_back(1)
    await huge
    assert budget.in_flight == 10
    budget.give_back(50)
    assert budget.in_flight == 0


async def test_a_wait_that_is_cancelled_leaves_its_place_to_the_next() -> None:
    budget = TokenBudget(10)
    await budget.take(6)
    long, short = asyncio.create_task(budget.take(8)), asyncio.create_task(budget.take(4))
    await asyncio.sleep(0)
    long.cancel()
    await short
    assert budget.in_flight == 10
