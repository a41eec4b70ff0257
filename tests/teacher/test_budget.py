import asyncio

from atoll.teacher.budget import Budget


async def test_what_does_not_fit_waits_until_it_does() -> None:
    budget = Budget(10)
    await budget.take(7)
    waiting = asyncio.create_task(budget.take(5))
    await asyncio.sleep(0)
    assert not waiting.done()
    budget.give_back(7)
    await waiting
    assert budget.taken == 5


async def test_more_than_the_whole_budget_takes_all_of_it() -> None:
    budget = Budget(10)
    await budget.take(50)
    assert budget.taken == 10
    budget.give_back(50)
    assert budget.taken == 0
