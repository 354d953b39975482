"""Are the parameters still equal? A check that runs unasked and needs no message.

[Note: spot checks]  At the end of the optimizer's step after passes 1, 2, 4, 8 and so on, a few elements of each
parameter are weighed. Ranks hold the same values there, even if each moves its weights for a backward and back, as with
SAM. Some bits of the weight travel behind the last bucket of the next pass, so that hardly any device is waited for. If
the ranks that compare do not all say the same, all ranks learn it at the same pass, compare all parameters together,
and rank 0 reports it once. If one rank alone has loaded weights or an optimizer's state, that is mostly reported in the
second pass.

Where an optimizer steps in shares, ranks are alike after the step whatever they were before, since each has sent what
it made of its own values. So there parameters are weighed where the step begins, and what was found is kept until the
others have spoken. Ranks without batches, or that gave up the pass in between, say nothing. If other ranks do not
compare in the same passes, their steps do not end after the same ones: for example, a closure runs another number of
backwards on each rank.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.overrides import has_torch_function_unary

from .check import check_replicas, is_readable, unlike, weigh, words_of
from .errors import ReplicaError
from .membership import Membership
from .peers import Peers
from .steps import IN_SHARES, listen, stepped_by, stop_listening
from .wording import name_list
from .words import COUNTS, FIRST_VALUE, LENGTH, VALUES, Control, to_host

_FEW = 64
"""Elements of a parameter that are looked at."""
_EVERY = 1 << 10
"""Passes, at most, from one spot check to the next."""
_SOME = 3
"""So often some of the ranks that step may compare, and others not, before all parameters are compared, once."""
_FRUITLESS = 2
"""So often ranks may say different things where parameters are equal, before no more is said."""

log = logging.getLogger("stretto")


def _few_of(tensor: torch.Tensor, number: int) -> torch.Tensor:
    """Some elements, neighbours as they read, others for each number. Not many more are copied for that."""
    row = tensor.detach().as_subclass(torch.Tensor)
    while row.dim():
        place, inner = number % len(row), row.numel() // len(row)
        if inner < _FEW:
            rows = -(-_FEW // inner)
            first = max(min(place, len(row) - rows), 0)
            row = row[first : first + rows]
            break
        row = row[place]
    return row.reshape(-1)[:_FEW]


def _can_be_looked_at(tensor: torch.Tensor) -> bool:
    """Values under way between hosts come to all from one rank, and reading them would wait."""
    return not has_torch_function_unary(tensor) and is_readable(tensor) and tensor.numel() > 0


class SpotCheck:
    """A few elements of each tensor, weighed, on their way to the host. See [Note: spot checks].

    Args:
        tensors: those that cannot be read are left out.
        number: says which elements.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], number: int = 0) -> None:
        found: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for tensor in tensors:
            if _can_be_looked_at(tensor):
                words = words_of(_few_of(tensor, number))
                found.setdefault((words.dtype, words.device), []).append(words)
        self._weights = [to_host(weigh(torch.cat(some))) for some in found.values()]

    def weights(self) -> list[int]:
        """One for each dtype and device, 0 for nothing but zeros. Waits until they are on the host."""
        for _, arrival in self._weights:
            if arrival is not None:
                arrival.synchronize()
        return [int(weight) for weight, _ in self._weights]

    def says(self) -> list[int]:
        """The words for it."""
        bits = 0
        for weight in self.weights():
            bits = zlib.crc32(weight.to_bytes(8, "little", signed=True), bits)  # each of its bits depends on all
        return [Control.COMPARES, *(FIRST_VALUE + place for place in range(VALUES) if bits >> place & 1)]


def _are_unlike(said: Sequence[float]) -> bool:
    """Whether of the ranks that compare some said a word of the values, and others did not."""
    compare, *values = (min(one, COUNTS) for one in (said[Control.COMPARES], *said[FIRST_VALUE:LENGTH]))
    return any(0 < one < compare for one in values)


class SpotChecks:
    """Those of one handle.

    Args:
        members: the parameters, and whether a comparison was asked for: then none of these.
        peers: the other ranks.
        speaks: this rank tells for all.
    """

    def __init__(self, members: Membership, peers: Peers, *, speaks: bool) -> None:
        self._members, self._peers, self._speaks = members, peers, speaks
        self._wanted = members.options.check_every is None
        self._passed, self._fruitless, self._some = 0, 0, 0
        self._mine: frozenset[int] = frozenset()  # whose step is awaited, by id
        self._depth = 0  # of steps of these that have begun: ZeroRedundancyOptimizer steps another, and sends then
        self._has_looked = False  # behind this pass, and a step in shares may follow, before which it would again
        self._begun = 0  # steps in shares, of all optimizers, when it looked
        self._taken: tuple[int, SpotCheck, Mapping[str, torch.Tensor]] | None = None  # behind which pass, at what
        self._kept: Mapping[str, torch.Tensor] = {}  # before a step in shares, which this rank has told of

    def ended(self, number: int) -> None:
        """A pass has ended. After some passes the next step is awaited, at whose end the parameters are compared."""
        self._passed, self._depth = number, 0
        if self._has_looked:
            self.stop()
        if self._wanted and not self._mine and not (number & number - 1 and number % _EVERY):
            self._mine = frozenset(map(id, self._members.everything().values()))
            listen(self._stepping)

    def _stepping(self, optimizer: torch.optim.Optimizer, begins: bool) -> None:
        """Of any optimizer, on any thread: of others nothing is touched."""
        mine = self._mine
        if not any(id(one) in mine for one in stepped_by(optimizer)):
            return
        in_shares = IN_SHARES in vars(optimizer)
        self._depth = 1 if in_shares and begins else self._depth + (1 if begins else -1)
        if in_shares and not begins:
            if self._has_looked:  # else a closure's pass has ended inside, and the next step is awaited
                self.stop()
        elif begins if in_shares else (not begins and self._depth <= 0 and not self._has_looked):
            self._has_looked = True
            if not (in_shares or self._peers.seat.steps):  # nobody steps in shares
                self.stop()
            with torch.no_grad():
                self._look(keep=in_shares)

    def _look(self, *, keep: bool) -> None:
        everything: Mapping[str, torch.Tensor] = self._members.everything()
        kept = dict[str, torch.Tensor]()
        # To ask what can be read waits for what is under way: else ranks that have read others would look at others.
        everything = {name: one for name, one in everything.items() if is_readable(one) and _can_be_looked_at(one)}
        if keep:
            everything = kept = {name: _few_of(one, self._passed).clone() for name, one in everything.items()}
        self._begun = sum(self._peers.seat.steps)
        self._taken = self._passed, SpotCheck(everything.values(), self._passed), kept

    def stop(self) -> None:
        """Await no step. Harmless twice."""
        self._mine, self._has_looked = frozenset(), False
        stop_listening(self._stepping)

    def says(self, number: int) -> list[int]:
        """What the last bucket of the pass is to tell."""
        taken, self._taken = self._taken, None
        refused = self._depth and self._begun != sum(self._peers.seat.steps)  # equal as long as a closure runs
        if taken is None or taken[0] != number - 1 or (taken[2] and refused):
            self._kept = {}
            return []
        self._kept = taken[2]
        return taken[1].says()

    def hear(self, said: Sequence[float], number: int, *, some: bool, idle: bool) -> None:
        """Look closely if ranks said different things, and tell of what differs. Collective.

        Args:
            said: what all ranks told in the pass.
            number: of the pass.
            some: some ranks compared, and others did not, although they step: their steps end after other passes.
            idle: this rank does not step any more.
        """
        self._some += some
        differ = _are_unlike(said)
        kept, self._kept = self._kept, {}
        if not (self._wanted and (differ or (some and self._some == _SOME))):
            return
        where = f"pass {number} of {type(self._members.module()).__name__}"
        try:
            check_replicas(None if idle else self._members.everything(), self._peers.gather, where)
        except ReplicaError as error:
            self._wanted = False
            if self._speaks:
                self._tell(error)
            return
        if differ and self._were_unlike(kept, where):
            self._wanted = False
            return
        self._fruitless += differ
        self._wanted = self._fruitless < _FRUITLESS
        if differ:
            log.info(
                "%s: the elements that ranks compared around the last step were not equal, but all parameters are "
                "equal now",
                where,
            )

    def _were_unlike(self, kept: Mapping[str, torch.Tensor], where: str) -> bool:
        """Before a step in shares, of what is equal now. Collective; tells of it. ``kept``: what was looked at."""
        names, lines = unlike(kept or None, self._peers.gather, in_common=True)
        if names and self._speaks:
            log.warning(
                "%s: before the last step the ranks held different values of %s. Each rank has stepped its share from "
                "its own values, so the model is equal on all ranks again, but a mixture.\n"
                "%s\n"
                "Change weights in the same way on all ranks: load them on each, and draw random values with one seed. "
                "Where the ranks of a host share them, some rank was writing to them in place: let all assign "
                "parameter.data = ... (docs/sharding.md). Start again from before that. Only a few elements were "
                "compared. Shown once; check_every=0 never looks.",
                where,
                name_list(names),
                "\n".join(lines),
            )
        return bool(names)

    def _tell(self, error: ReplicaError) -> None:
        log.warning(
            "%s\n"
            "stretto compares a few elements now and then. If ranks are meant to train on their own for a while, "
            "ignore this. Shown once; check_every=n compares everything, and raises; check_every=0 never compares.",
            error,
        )
