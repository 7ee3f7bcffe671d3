"""How many messages the server still owes: exact in sum, few requests, and nothing forgotten."""

from jsworker.stream.puller import MOST_REQUESTS, Credit


def test_at_first_all_the_room_is_asked_for() -> None:
    assert Credit().wanted(10) == 10
    assert Credit().wanted(0) == 0
    assert Credit().wanted(-3) == 0


def test_what_is_outstanding_is_not_asked_for_again() -> None:
    outstanding = Credit()
    outstanding.ask(1, 10, 100.0)
    assert outstanding.wanted(10) == 0
    assert outstanding.wanted(9) == 0
    assert outstanding.wanted(14) == 4


def test_little_room_is_asked_for_only_when_nothing_is_outstanding() -> None:
    outstanding = Credit()
    outstanding.ask(1, 90, 100.0)
    assert outstanding.wanted(100) == 0, "10 of 100 is less than a quarter"
    assert outstanding.wanted(120) == 30
    for _ in range(90):
        outstanding.received()
    assert outstanding.wanted(1) == 1


def test_a_few_are_not_asked_for_while_more_wait_for_a_slot() -> None:
    outstanding = Credit()
    assert outstanding.wanted(2, waiting=4) == 0
    assert outstanding.wanted(3, waiting=3) == 3
    assert outstanding.wanted(9, waiting=40) == 0
    assert outstanding.wanted(10, waiting=40) == 10


def test_many_are_asked_for_together_while_many_wait_for_a_slot() -> None:
    outstanding = Credit()
    assert outstanding.wanted(249, waiting=1000) == 0
    assert outstanding.wanted(250, waiting=1000) == 250


def test_an_ended_request_no_longer_counts() -> None:
    outstanding = Credit()
    outstanding.ask(1, 10, 100.0)
    outstanding.ask(2, 5, 100.0)
    outstanding.received()
    outstanding.ended(1, 9)
    assert outstanding.total == 5
    outstanding.ended(2, 5)
    assert outstanding.total == 0


def test_a_message_too_many_does_not_make_it_negative() -> None:
    outstanding = Credit()
    outstanding.received()
    outstanding.ended(7, 3)
    assert outstanding.total == 0
    assert outstanding.wanted(4) == 4


def test_the_number_of_requests_is_limited() -> None:
    outstanding = Credit()
    for request in range(MOST_REQUESTS):
        batch = outstanding.wanted(2 * outstanding.total + 100)
        assert batch == outstanding.total + 100
        outstanding.ask(request, batch, 100.0)
    room = 10 * outstanding.total
    assert outstanding.wanted(room) == 0
    for _ in range(100):
        outstanding.received()
    assert outstanding.wanted(room) == room - outstanding.total, "the first is served"


def test_a_request_that_never_ends_is_found() -> None:
    outstanding = Credit()
    outstanding.ask(1, 10, 100.0)
    assert not outstanding.overdue(99.0)
    assert outstanding.overdue(101.0)
    for _ in range(10):
        outstanding.received()
    assert not outstanding.overdue(101.0), "it was served"
