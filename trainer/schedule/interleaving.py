"""The order of a worker's passes where each pipeline stage is cut in parts: interleaved 1F1B. Pure.

Part c of stage s holds layers number c x stages + s, counted in parts of the model, so a micro
batch goes through all stages `parts` times. Micro batches go in rounds of at least as many as there
are stages, every round through all parts: then no stage waits for the last one to send a round
back. Rounds are as even as they can be, so any number will do.
"""

from __future__ import annotations

from functools import lru_cache

from trainer.contract.record import Record

TIMES = {True: 1, False: 2}  # of a forward pass, and of a backward pass


class Pass(Record):
    """One micro batch forward or backward through one part of a worker's stage.

    `taken`: places, in the worker's order, of passes whose message has been taken by the time this
    one begins.
    """

    is_forward: bool
    part: int
    micro_batch: int
    taken: tuple[int, ...] = ()


def rounds(micro_batches: int, stages: int) -> list[int]:
    """Micro batches of each round, in order."""
    count = max(1, micro_batches // stages)
    return [micro_batches // count + (number < micro_batches % count) for number in range(count)]


@lru_cache(maxsize=4096)
def held_counts(
    micro_batches: int, stages: int, parts: int, stage: int
) -> tuple[tuple[int, ...], ...]:
    """How many micro batches of each part wait for their backward pass: the moments at which most
    do.

    Each entry has a count for each part; what another moment has of every part is no more than one
    of these.
    """
    counts = [0] * parts
    found: set[tuple[int, ...]] = set()
    for is_forward, _, part, _ in _order(micro_batches, stages, parts, stage=stage, trains=True):
        if not is_forward:
            found.add(tuple(counts))
        counts[part] += 1 if is_forward else -1
    return tuple(
        one
        for one in found
        if not any(one != other and all(map(int.__le__, one, other)) for other in found)
    )


_Place = tuple[bool, int, int, int]  # of a pass: is it forward, stage, part, micro batch


@lru_cache(maxsize=8)
def passes(
    micro_batches: int, stages: int, parts: int, stage: int, trains: bool = True
) -> tuple[Pass, ...]:
    """The order of a stage's passes. Not `trains`: forward alone.

    All stages take forward passes in one order and backward passes in another, so messages of a
    kind arrive in the order in which they are needed. A rank that takes its passes in this order,
    sends without waiting and waits for what it needs never waits in a circle, since every wait is
    for something earlier in one and the same step. That step's times also say when a message has
    been taken.
    """
    orders = [
        _order(micro_batches, stages, parts, stage=number, trains=trains)
        for number in range(stages)
    ]
    return _with_taken(orders[stage], stages, parts, _begins(orders, parts))


def _order(micro_batches: int, stages: int, parts: int, stage: int, trains: bool) -> list[_Place]:
    """The passes of a stage. Forward ones first, as many as the stages behind need to begin; then
    in turn.
    """
    forward: list[_Place] = []
    backward: list[_Place] = []
    sizes, first = rounds(micro_batches, stages), 0
    for size in sizes:
        for part in range(parts):
            forward += [(True, stage, part, first + index) for index in range(size)]
            backward += [(False, stage, parts - 1 - part, first + index) for index in range(size)]
        first += size
    if not trains:
        return forward
    ahead = min(len(forward), stages - 1 - stage + (parts - 1) * sizes[0])
    turns = [place for pair in zip(forward[ahead:], backward, strict=False) for place in pair]
    return forward[:ahead] + turns + backward[len(forward) - ahead :]


def _source(place: _Place, stages: int, parts: int) -> _Place | None:
    """The pass whose result another one needs; None where that is data."""
    is_forward, stage, part, micro_batch = place
    step = -1 if is_forward else 1
    if 0 <= stage + step < stages:
        return is_forward, stage + step, part, micro_batch
    if 0 <= part + step < parts:
        return is_forward, stages - 1 if is_forward else 0, part + step, micro_batch
    if is_forward:
        return None
    return (True, stage, part, micro_batch)


def _begins(orders: list[list[_Place]], parts: int) -> dict[_Place, int]:
    """When each pass begins, where messages take no time."""
    stages = len(orders)
    begins: dict[_Place, int] = {}
    ends: dict[_Place, int] = {}
    done, free = [0] * stages, [0] * stages
    waiting = set(range(stages))
    while waiting:
        before = len(ends)
        for stage in sorted(waiting):
            order = orders[stage]
            while done[stage] < len(order):
                place = order[done[stage]]
                source = _source(place, stages, parts)
                if source is not None and source not in ends:
                    break
                begin = free[stage]
                if source is not None:
                    begin = max(begin, ends[source])
                begins[place] = begin
                ends[place] = free[stage] = begin + TIMES[place[0]]
                done[stage] += 1
            else:
                waiting.discard(stage)
        assert len(ends) > before or not waiting, "the passes wait in a circle"
    return begins


def _with_taken(
    order: list[_Place], stages: int, parts: int, begins: dict[_Place, int]
) -> tuple[Pass, ...]:
    """The passes of a stage, each with those of the same stage whose message was taken before it
    begins.
    """
    takers = {
        source: place
        for place in begins
        if (source := _source(place, stages, parts)) and source[1] != place[1]
    }
    found: list[Pass] = []
    # passes whose message has not been taken, and what takes it
    sent: list[tuple[int, _Place]] = []
    for index, place in enumerate(order):
        now = begins[place]
        taken = tuple(number for number, taker in sent if begins[taker] < now)
        sent = [entry for entry in sent if begins[entry[1]] >= now]
        found.append(Pass(place[0], place[2], place[3], taken))
        if place in takers:
            sent.append((index, takers[place]))
    return tuple(found)
