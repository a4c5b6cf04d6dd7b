"""Engines exchange weights one at a time: whose turn it is, and when one goes without."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sixfold_runtime.engine.protocol import ModelInfo, State
from sixfold_runtime.engine.swap_turn import MAX_WAIT_SECONDS, SwapTurn
from sixfold_runtime.gateway.pool import swap_turns


def state(pod: str, pending: bool = False, swapping: bool = False, model: str = "chat") -> State:
    info = ModelInfo(model, "Generation", 100, "", swapping=swapping, swap_pending=pending)
    return State(pod, [info], sequence=1, level=1)


def test_the_first_by_name_while_none_is_in_the_middle_of_it() -> None:
    assert swap_turns([]) == {}
    assert swap_turns([state("b", pending=True), state("a", pending=True), state("c")]) == {"chat": 1}
    assert swap_turns([state("b", pending=True), state("a", swapping=True)]) == {}
    assert swap_turns([state("b", pending=True), state("a", swapping=True, model="other")]) == {"chat": 0}


@given(st.lists(st.sampled_from(["idle", "pending"]), max_size=6), st.randoms())
def test_all_engines_come_through_one_at_a_time(kinds: list[str], random: object) -> None:
    """Whatever the order in which a gateway sees the engines, it gives the turn to the same pod."""
    pods = {f"pod-{index}": kind for index, kind in enumerate(kinds)}
    order = []
    while True:
        seen = [state(pod, pending=kind == "pending") for pod, kind in pods.items()]
        random.shuffle(seen)  # type: ignore[attr-defined]
        turns = swap_turns(seen)
        if not turns:
            break
        order.append(seen[turns["chat"]].pod)
        pods[order[-1]] = "done"
    assert order == sorted(pod for pod, kind in zip(pods, kinds, strict=True) if kind == "pending")


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_a_turn_is_asked_for_only_where_engines_share_gateways() -> None:
    turn = SwapTurn(lambda: None)
    assert turn.ask(), "nobody else is there"
    turn.is_shared = True
    assert not turn.ask()
    assert turn.is_waiting
    turn.give()
    assert turn.ask()
    turn.end()
    turn.give()
    assert not turn.ask(), "a turn that nobody asked for is not kept"
    turn.end()


def test_a_gateway_that_gives_no_turns_holds_nothing_up_for_ever() -> None:
    clock = Clock()
    turn = SwapTurn(lambda: None, clock)
    turn.is_shared = True
    assert not turn.ask()
    clock.seconds = MAX_WAIT_SECONDS
    assert turn.ask()
    turn.end()
