"""Who may hold what, example by example."""

import pytest

from vllm_pacer.fairness import KEEP_NS, FairShare, FirstCome, Member


def hold(fair: FairShare, member: Member, slots: int, blocks: int = 1) -> None:
    """Let a user have so many residents of so many blocks each."""
    for _ in range(slots):
        fair.admit(member, blocks)


def fair_of(slots: int = 16, blocks: int = 160, **weights: float) -> FairShare:
    """A fair share of an engine."""
    return FairShare(slots, blocks, weights)


def test_the_share_is_of_what_the_user_holds_most_of() -> None:
    """Half of the blocks in two of sixteen slots are a share of a half."""
    fair = fair_of()
    user = fair.enter("a")
    hold(fair, user, 2, blocks=40)
    assert fair.share(user) == 0.5


def test_a_weight_divides_the_share() -> None:
    """A user of weight two may hold twice as much for the same share."""
    fair = fair_of(heavy=2)
    heavy, light = fair.enter("heavy"), fair.enter("light")
    hold(fair, heavy, 4)
    hold(fair, light, 2)
    assert fair.share(heavy) == fair.share(light)


def test_one_user_is_entitled_to_everything() -> None:
    """With one user present nothing is held back."""
    fair = fair_of()
    user = fair.enter("a")
    hold(fair, user, 15, blocks=10)
    assert fair.is_entitled(user, blocks=10)


@pytest.mark.parametrize("heavy_weight", [1, 4])
@pytest.mark.parametrize("users", [2, 4, 5, 16, 17, 40])
def test_nobody_has_a_slot_to_claim_when_there_are_too_many(
    users: int, heavy_weight: float
) -> None:
    """As long as somebody is entitled to a slot, it is known without asking for each."""
    fair = fair_of(slots=4, **{"user-0": heavy_weight})
    members = [fair.enter(f"user-{number}") for number in range(users)]
    assert fair.is_anyone_entitled() == any(fair.is_entitled(each, 0) for each in members)


@pytest.mark.parametrize(("held", "gives_way"), [(1, False), (2, True), (16, True)])
def test_a_holder_gives_way_while_its_share_stays_the_greater(held: int, gives_way: bool) -> None:
    """Two residents against none become one each; one against none stays where it is."""
    fair = fair_of()
    holder, newcomer = fair.enter("a"), fair.enter("b")
    hold(fair, holder, held)
    assert fair.gives_way(holder, 1, 1, newcomer, 1) is gives_way


def test_giving_way_comes_to_an_end() -> None:
    """However two users start, slots change hands until their numbers are even, and no longer."""
    fair = fair_of()
    users = [fair.enter("a"), fair.enter("b")]
    hold(fair, users[0], 16)
    moves = 0
    for _ in range(100):
        for holder, newcomer in (users, users[::-1]):
            if fair.gives_way(holder, 1, 1, newcomer, 1):
                fair.release(holder, 1)
                fair.admit(newcomer, 1)
                moves += 1
    assert moves == 8
    assert [user.slots for user in users] == [8, 8]


def test_nobody_gives_way_to_itself() -> None:
    """A user's own requests are no newcomers to it."""
    fair = fair_of()
    user = fair.enter("a")
    hold(fair, user, 16)
    assert not fair.gives_way(user, 1, 1, user, 1)


def test_room_that_a_user_leaves_is_kept_for_those_within_their_part() -> None:
    """Whoever has more than its part does not get the last slot for a while; others do."""
    fair = fair_of()
    heavy, light, other = fair.enter("heavy"), fair.enter("light"), fair.enter("other")
    hold(fair, heavy, 15)
    hold(fair, light, 1)
    fair.release(light, 1)
    fair.keep(light, 1, now_ns=0)
    fair.leave(light)
    assert not fair.may_admit(heavy, 1, free_slots=1, free_blocks=100)
    assert fair.may_admit(heavy, 1, free_slots=2, free_blocks=100)
    assert fair.is_entitled(other, 1)
    fair.expire(KEEP_NS - 1)
    assert not fair.may_admit(heavy, 1, free_slots=1, free_blocks=100)
    fair.expire(KEEP_NS)
    assert fair.may_admit(heavy, 1, free_slots=1, free_blocks=100)
    assert fair.next_expiry_ns() is None


def test_kept_blocks_are_left_alone() -> None:
    """Whoever has more than its part does not get the blocks that are kept, either."""
    fair = fair_of()
    heavy, light = fair.enter("heavy"), fair.enter("light")
    hold(fair, heavy, 4, blocks=30)
    fair.admit(light, 20)
    fair.release(light, 20)
    fair.keep(light, 20, now_ns=0)
    assert not fair.may_admit(heavy, 10, free_slots=10, free_blocks=25)
    assert fair.may_admit(heavy, 5, free_slots=10, free_blocks=25)


def test_the_next_request_takes_the_place_that_was_kept() -> None:
    """With its next request the user uses what was kept for it."""
    fair = fair_of()
    light = fair.enter("light")
    fair.enter("other")
    for now_ns in range(5):
        fair.admit(light, 1)
        fair.use_kept(light)
        fair.release(light, 1)
        fair.keep(light, 1, now_ns)
    assert len(light.kept) == 1


def test_kept_room_expires_though_the_same_user_keeps_coming() -> None:
    """A user that always has room kept does not keep another's for ever, and leaves no trace."""
    fair = fair_of()
    busy, gone = fair.enter("busy"), fair.enter("gone")
    hold(fair, busy, 2)
    hold(fair, gone, 1)
    fair.release(busy, 1)
    fair.keep(busy, 1, now_ns=0)
    fair.release(gone, 1)
    fair.keep(gone, 1, now_ns=1)
    fair.leave(gone)
    for now_ns in range(2, 2 * KEEP_NS, KEEP_NS // 20):
        fair.expire(now_ns)
        fair.use_kept(busy)
        fair.keep(busy, 1, now_ns)
    assert len(fair) == 1
    assert len(fair.keepers) <= 21


def test_little_is_kept() -> None:
    """A user that leaves with all its requests at once has an eighth of the slots kept."""
    fair = fair_of()
    user = fair.enter("a")
    hold(fair, user, 16)
    for now_ns in range(16):
        fair.release(user, 1)
        fair.keep(user, 1, now_ns)
    assert len(user.kept) == 2


def test_nothing_is_kept_beyond_a_users_part() -> None:
    """A user that has more than its part leaves its room to all."""
    fair = fair_of()
    heavy = fair.enter("heavy")
    fair.enter("light")
    hold(fair, heavy, 16)
    fair.release(heavy, 1)
    fair.keep(heavy, 1, now_ns=0)
    assert not heavy.kept


def test_a_user_is_forgotten_when_nothing_is_kept_for_it() -> None:
    """A million one-shot users leave no trace once their time has passed."""
    fair = fair_of()
    for number in range(1000):
        fair.expire(number * KEEP_NS // 100)
        user = fair.enter(str(number))
        fair.admit(user, 1)
        fair.release(user, 1)
        fair.keep(user, 1, number * KEEP_NS // 100)
        fair.leave(user)
        assert len(fair) <= 3
    fair.expire(1 << 62)
    assert len(fair) == 0


def test_first_come_shares_nothing() -> None:
    """With sharing off everybody is admitted, nothing is kept, and nobody gives way."""
    fair = FirstCome(16, 160, {})
    heavy, light = fair.enter("heavy"), fair.enter("light")
    hold(fair, heavy, 15)
    fair.keep(light, 1, now_ns=0)
    assert fair.share(heavy) == fair.share(light)
    assert fair.may_admit(heavy, 1, free_slots=0, free_blocks=0)
    assert not fair.gives_way(heavy, 1, 1, light, 1)


def test_no_more_slots_are_kept_than_there_are_beside_the_positions_of_a_step() -> None:
    """An engine that could compute in a slot does not lose it to what is kept."""
    for spare_slots, kept in ((0, 0), (1, 1), (2, 2), (9, 2)):
        fair = FairShare(16, 1000, {}, spare_slots)
        light, heavy = fair.enter("light"), fair.enter("heavy")
        for number in range(4):
            fair.keep(light, 1, now_ns=number)
        assert not fair.may_admit(heavy, 1, free_slots=kept, free_blocks=1000)
        assert fair.may_admit(heavy, 1, free_slots=kept + 1, free_blocks=1000)
