"""The weight board without Ray around it."""

import asyncio

import pytest

from online_sao.service import board as board_module
from online_sao.service.board import Announcement, WeightBoard

Board = WeightBoard.__ray_metadata__.modified_class
SOON_S = 0.05
LOADING_S = 0.5  # longer than a busy machine stalls


@pytest.fixture
def board():
    return Board()


async def test_a_replica_that_is_behind_gets_what_is_current(board):
    await board.announce(Announcement(3))
    assert (await board.fetch("a", 2, SOON_S)).version == 3
    assert await board.fetch("a", 3, SOON_S) is None


async def test_a_waiting_replica_is_woken(board):
    await board.announce(Announcement(3))
    waiting = asyncio.create_task(board.fetch("a", 3, 60))
    await asyncio.sleep(0)
    await board.announce(Announcement(4))
    assert (await waiting).version == 4


async def test_a_board_that_was_restarted_tells_no_replica_to_go_back(board):
    """It knows nothing yet: to say 0 would name weights that the engine does not have."""
    assert await board.current_version() is None
    assert await board.fetch("a", 7, SOON_S) is None
    await board.announce(Announcement(7))
    assert await board.fetch("a", 7, SOON_S) is None


async def test_applied_everywhere_or_what_went_wrong(board):
    for name in "ab":
        await board.report(name, 3)
    assert await board.wait_applied(3, SOON_S) is None
    await board.report("a", 4)
    assert "no answer from b" in await board.wait_applied(4, SOON_S)
    await board.report("b", 4, "no room")
    assert await board.wait_applied(4, SOON_S) == "no room"
    await board.leave("b")
    assert await board.wait_applied(4, SOON_S) is None


async def test_what_went_wrong_with_an_earlier_version_is_not_said_of_the_next(board):
    await board.report("a", 3)
    await board.report("a", 4, "no room")
    await board.announce(Announcement(5))
    waiting = asyncio.create_task(board.wait_applied(5, 60))
    await asyncio.sleep(SOON_S)
    assert not waiting.done()  # it may be loading: its file must not be overwritten
    await board.report("a", 5)
    assert await asyncio.wait_for(waiting, 30) is None


async def test_a_replica_that_is_lost_is_waited_for_only_until_it_is_out_of_touch(
    board, monkeypatch
):
    """It never says that it is gone: its node is."""
    monkeypatch.setattr(board_module, "RECHECK_S", 0.01)
    monkeypatch.setattr(board_module, "HEARD_WITHIN_S", 0.05)
    await board.report("a", 4)
    await board.report("lost", 3)
    waiting = asyncio.create_task(board.wait_applied(4, 60))
    assert await asyncio.wait_for(waiting, 30) is None


async def test_a_replica_that_loads_is_waited_for_though_it_does_not_ask(board, monkeypatch):
    """The learner must not overwrite the file that is being read."""
    monkeypatch.setattr(board_module, "RECHECK_S", 0.01)
    monkeypatch.setattr(board_module, "HEARD_WITHIN_S", 0.0)
    await board.announce(Announcement(4))
    await board.fetch("slow", 3, SOON_S)
    assert "no answer from slow" in await board.wait_applied(4, LOADING_S)
    waiting = asyncio.create_task(board.wait_applied(4, 60))
    await asyncio.sleep(SOON_S)
    assert not waiting.done()
    await board.report("slow", 4)
    assert await asyncio.wait_for(waiting, 30) is None
    # and one that died over it is given up after the time that loading may take
    await board.announce(Announcement(5))
    await board.fetch("dead", 4, SOON_S)
    await asyncio.sleep(2 * SOON_S)
    assert await board.wait_applied(5, SOON_S) is None
