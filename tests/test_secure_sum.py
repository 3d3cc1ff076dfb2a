"""Secure sums: exact through dropouts at every moment, refusals of every second chance, and nothing to see for the server."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from signing import Keys, Signer

from fedbilevel.engines.secure_sum import NO_SUM, SECRET, Advert, Collector, Participant, Prepared, Shares
from fedbilevel.errors import InputError

ASKED, ASKED_OTHERS = (bytes([k]) * 32 for k in (1, 2))


class Sum:
    """One sum, with the stage (keys, shares, mask, unmask) after which each client falls silent."""

    def __init__(self, values, least, silent_after=None, keys=None):
        self.keys = keys = keys or Keys(len(values))
        self.values, self.least, self.silent = values, least, silent_after or {}
        self.clients = {m: Participant(m, least, Signer(keys, m)) for m in range(len(values))}
        self.server, self.prepared = Collector(least, Signer(keys, 0)), None
        self.masked, self.following, self.unmasking, self.sealed = {}, {}, {}, {}

    def there(self, stage, among):
        return [m for m in among if self.silent.get(m, 9) >= stage]

    def advertise(self):
        return {m: self.clients[m].advertise() for m in self.there(1, self.clients)}

    def prepare(self):
        keys = self.server.usable(self.advertise())
        self.prepared = Prepared(keys, {m: self.clients[m].share(keys) for m in self.there(2, keys)})

    @property
    def members(self):
        return sorted(self.prepared.clients)

    def mask(self, m, asked=ASKED, members=None):
        """What a client sends if it is asked that, with those members."""
        return self.clients[m].mask(self.prepared.sealed_for(m, members or self.members), asked, self.values[m])

    def masks(self):
        if self.prepared is None:
            self.prepare()
        for m in self.there(3, self.members):
            self.masked[m], self.following[m] = self.mask(m)
        return self.masked

    def total(self):
        self.masks()
        for m in self.there(4, self.masked):
            self.unmasking[m], self.sealed[m] = self.clients[m].unmask(self.masked, self.following)
        return self.opened()

    def opened(self, unmasking=None):
        return self.server.total(self.prepared, self.members, ASKED, self.masked, unmasking or self.unmasking)

    def next(self, values, silent_after=None):
        """The sum after this one, with the keys and shares that came with it."""
        after = Sum(values, self.least, silent_after, self.keys)
        after.clients = {m: self.clients[m].following for m in self.following}
        after.prepared = Prepared(self.following, self.sealed)
        return after


def values(clients, size=5, seed=0):
    return list(np.random.default_rng(seed).integers(0, 2**32, (clients, size), dtype=np.uint32))


def exact(ours):
    """The sum of those that are in it."""
    return np.sum([ours.values[m] for m in ours.masked], 0, dtype=np.uint32)


def test_the_sum_is_exact_modulo_two_to_the_32_also_with_the_keys_that_came_with_another():
    ours = Sum(values(5), 3)
    for seed in (1, 2):
        np.testing.assert_array_equal(ours.total(), np.sum(ours.values, 0, dtype=np.uint32))
        ours = ours.next(values(5, seed=seed))


@pytest.mark.parametrize("stages", list(itertools.product([0, 1, 2, 3, 9], repeat=2)))
def test_whoever_drops_out_at_whatever_moment_the_sum_is_that_of_the_others(stages):
    silent = {1: stages[0], 4: stages[1]}
    ours = Sum(values(5), 3, silent)
    total = ours.total()
    assert set(ours.masked) == {m for m in range(5) if silent.get(m, 9) >= 3}
    np.testing.assert_array_equal(total, exact(ours))


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(3, 7), data=st.data())
def test_any_dropouts_that_leave_enough_are_recovered_in_this_sum_and_the_next(seed, n, data):
    least = data.draw(st.integers(2, n - 1))
    lost = data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=n - least))
    ours = Sum(values(n, seed=seed), least, {m: data.draw(st.integers(0, 3)) for m in lost})
    np.testing.assert_array_equal(ours.total(), exact(ours))
    left = sorted(ours.sealed)
    lost = data.draw(st.lists(st.sampled_from(left), unique=True, max_size=len(left) - least))
    after = ours.next(values(n, seed=seed + 1), {m: data.draw(st.integers(0, 3)) for m in lost})
    np.testing.assert_array_equal(after.total(), exact(after))


def test_a_sum_over_some_of_those_who_have_keys_needs_nothing_of_the_others():
    ours = Sum(values(6), 3)
    ours.prepare()
    members = [0, 2, 3, 5]
    for m in members:
        ours.masked[m], ours.following[m] = ours.mask(m, members=members)
    for m in members[1:]:
        ours.unmasking[m], _ = ours.clients[m].unmask(members, ours.following)
        assert ours.unmasking[m].seeds.keys() == set(members) and not ours.unmasking[m].keys
    total = ours.server.total(ours.prepared, members, ASKED, ours.masked, ours.unmasking)
    np.testing.assert_array_equal(total, exact(ours))


def test_too_few_clients_are_refused_at_every_stage():
    for stage in (0, 1, 2):
        with pytest.raises(InputError, match="this one insists on 3"):
            Sum(values(4), 3, {0: stage, 1: stage}).total()
    with pytest.raises(RuntimeError, match="2 clients helped to unmask a secure sum, and 3 must"):
        Sum(values(4), 3, {0: 3, 1: 3}).total()
    with pytest.raises(InputError, match="fewer than 2 clients hides nothing"):
        Participant(0, 1, None)


def test_a_late_answer_is_never_unmasked():
    """The server says that client 2 dropped out, gets the shares of its key, and then cannot have those of its seed."""
    ours = Sum(values(4), 3)
    masked = ours.masks()
    without = [m for m in masked if m != 2]
    shares = {m: ours.clients[m].unmask(without, ours.following)[0] for m in without}
    assert all(2 in s.keys and 2 not in s.seeds for s in shares.values())
    for m in without:
        with pytest.raises(InputError, match="out of order, or one is repeated"):
            ours.clients[m].unmask(masked, ours.following)
    with pytest.raises(RuntimeError, match="0 clients helped to unmask"):  # nobody gave it a share of that seed
        ours.opened(shares)


def test_shares_of_a_key_and_of_a_seed_are_never_both_given():
    ours = Sum(values(5), 3, {3: 2})
    ours.total()
    for shares in ours.unmasking.values():
        assert not shares.seeds.keys() & shares.keys.keys()
        assert shares.keys.keys() == {3} and shares.seeds.keys() == {0, 1, 2, 4}


def test_masked_values_look_uniform_and_unlike_each_time():
    given = [np.zeros(20_000, np.uint32) for _ in range(3)]
    ours = Sum(given, 2)
    ours.total()
    first, second = ours.masked, ours.next(given).masks()
    for m in first:
        bits = np.unpackbits(first[m].view(np.uint8))
        assert abs(bits.mean() - 0.5) < 5 * 0.5 / np.sqrt(bits.size)
        counts = np.bincount(first[m].view(np.uint8), minlength=256)
        assert ((counts - 312.5) ** 2 / 312.5).sum() < 400  # χ² of 255 degrees: above it once in 10⁸
        assert (first[m] != second[m]).mean() > 0.999
    for a, b in itertools.combinations(first, 2):
        assert abs(np.corrcoef(first[a].astype(float), first[b].astype(float))[0, 1]) < 0.05


def forged(ours, helpers, share=bytes(SECRET)):
    """What clients hand out to unmask a sum, if these forge their shares of whatever they hold."""
    false = {m: Shares(*({u: share for u in kind} for kind in ours.unmasking[m])) for m in helpers}
    return ours.unmasking | false


def test_what_fewer_than_the_threshold_know_together_does_not_unmask():
    """With t - 1 shares of a seed every guess of the missing one is as good, and a wrong one is noticed."""
    ours = Sum(values(4), 3)
    ours.total()
    with pytest.raises(RuntimeError, match="the shares of client 0's seed do not make its seed"):
        ours.opened(forged(ours, [0, 1]))
    ours = Sum(values(5), 3, {4: 2})
    ours.total()
    seeds = {m: s.seeds for m, s in ours.unmasking.items()}
    false_keys = {m: Shares(seeds[m], s.keys) for m, s in forged(ours, [0, 1]).items()}
    with pytest.raises(RuntimeError, match="the shares of client 4's key do not make its key"):
        ours.opened(false_keys)


@pytest.mark.parametrize("share", [bytes(SECRET), bytes([255]) * SECRET, b"short"])
@pytest.mark.parametrize("helpers", [[0], [0, 2], [1, 3]])
def test_false_shares_are_got_round_while_enough_are_right(helpers, share):
    ours = Sum(values(6), 3, {5: 2})
    ours.total()
    np.testing.assert_array_equal(ours.opened(forged(ours, helpers, share)), exact(ours))


def test_keys_that_other_clients_would_refuse_are_not_handed_on():
    """Each of them would have every honest client refuse the sum."""
    ours = Sum(values(4), 2)
    honest = ours.advertise()

    def signed(**change):
        return ours.keys.signed(0, honest[0]._replace(**change))

    assert set(ours.server.usable(honest | {0: signed()})) == {0, 1, 2, 3}
    for false in (
        honest[0]._replace(signature=honest[1].signature),
        honest[0]._replace(signature=b""),
        signed(cipher_key=bytes(32)),  # of low order: no secret can be agreed with it
        signed(mask_key=bytes(32)),
        signed(cipher_key=honest[0].mask_key),
        signed(masked=b"short"),
        Advert.read(b""),
    ):
        assert set(ours.server.usable(honest | {0: false})) == {1, 2, 3}


def test_clients_that_send_something_else_have_dropped_out():
    ours = Sum(values(5), 3)
    adverts = ours.advertise()
    keys = ours.server.usable(adverts | {4: adverts[4]._replace(mask_key=b"short")})
    assert set(keys) == {0, 1, 2, 3}
    shares = {m: ours.clients[m].share(keys) for m in keys}
    ours.prepared = Prepared(keys, shares | {3: {0: b"for one alone"}})
    np.testing.assert_array_equal(ours.total(), np.sum(ours.values[:3], 0, dtype=np.uint32))
    with pytest.raises(RuntimeError, match="2 clients helped to unmask"):
        ours.opened(ours.unmasking | {1: Shares({}, {})})


def test_keys_that_the_server_swapped_are_refused():
    ours, theirs = Sum(values(3), 2), Sum(values(3), 2)
    adverts, other = ours.advertise(), theirs.advertise()
    with pytest.raises(InputError, match="client 1 has not signed this"):
        ours.clients[0].share({**adverts, 1: other[1]})
    with pytest.raises(InputError, match="client 2 has not signed this"):
        ours.clients[1].share({**adverts, 2: adverts[2]._replace(cipher_key=other[2].cipher_key)})
    with pytest.raises(InputError, match="lack this client's own or hold one twice"):
        ours.clients[2].share({**adverts, 0: adverts[1]})


@pytest.mark.parametrize("what", ["of now", "of then", "none"])
def test_keys_of_an_earlier_sum_cannot_be_replayed(what):
    """The server knows the key of client 2, which dropped out then; with it, it would know what client 0 adds for 2 now."""
    keys = Keys(3)
    old, new = (Sum(values(3), 2, keys=keys) for _ in range(2))
    before, now = old.advertise(), new.advertise()
    then = {m: c.share(before) for m, c in old.clients.items()}
    mixed = {**now, 2: before[2]}
    with pytest.raises(InputError, match="a false one in this client's name"):
        new.clients[2].share(mixed)
    with pytest.raises(InputError, match="out of order, or one is repeated"):
        old.clients[2].share(mixed)
    shares = {1: new.clients[1].share(mixed)[0]}
    new.clients[0].share(mixed)
    shares |= {"of then": {2: then[2][0]}, "of now": {2: shares[1]}, "none": {2: bytes(len(then[2][0]))}}[what]
    with pytest.raises(InputError, match="client 2 sent for a secure sum were changed on the way"):
        new.clients[0].mask(shares, ASKED, new.values[0])


def test_clients_that_were_given_other_keys_than_each_other_do_not_read_their_shares():
    """The server leaves client 3 out of what client 0 sees, so that 0 and the others would not share with the same clients."""
    ours = Sum(values(4), 2)
    keys = ours.advertise()
    few = {m: keys[m] for m in (0, 1, 2)}
    shares = {m: c.share(few if m == 0 else keys) for m, c in ours.clients.items()}
    for u, v in ((0, 1), (1, 0)):
        with pytest.raises(InputError, match=f"client {v} sent for a secure sum were changed on the way"):
            ours.clients[u].mask({v: shares[v][u], 2: shares[2][u]}, ASKED, ours.values[u])


def test_shares_that_were_changed_or_sent_to_another_are_refused():
    for change in (lambda s, m: bytes([s[1][m][0] ^ 1]) + s[1][m][1:], lambda s, m: s[1][2 if m == 0 else 0]):
        ours = Sum(values(3), 2)
        adverts = ours.advertise()
        shares = {m: c.share(adverts) for m, c in ours.clients.items()}
        with pytest.raises(InputError, match="client 1 sent for a secure sum were changed on the way"):
            ours.clients[0].mask({1: change(shares, 0), 2: shares[2][0]}, ASKED, ours.values[0])


def lied_to(how):
    """A sum whose server asks client 0 for something else than the others, or names other members to it."""
    ours = Sum(values(4), 2)
    ours.prepare()
    lie = {"asked": {"asked": ASKED_OTHERS}, "members": {"members": [0, 1, 2]}}[how]
    for m in ours.members:
        ours.masked[m], ours.following[m] = ours.mask(m, **(lie if m == 0 else {}))
    return ours


@pytest.mark.parametrize("how", ["asked", "members"])
def test_no_shares_are_handed_out_unless_all_are_in_the_same_sum(how):
    arrived = [0, 1, 2]
    for m in arrived:
        ours = lied_to(how)
        with pytest.raises(InputError, match="has not signed that it is in the same secure sum as this one"):
            ours.clients[m].unmask(arrived, ours.following)
        with pytest.raises(InputError, match="out of order, or one is repeated"):  # no second chance
            ours.clients[m].unmask([m, 3], ours.following)


@pytest.mark.parametrize("how", ["asked", "members"])
def test_the_masks_of_clients_in_unlike_sums_do_not_cancel(how):
    """Not even if the server could forge what they have signed."""
    ours = lied_to(how)
    theirs = {m: advert.masked for m, advert in ours.following.items()}

    def pretended(m):
        return {v: ours.keys.signed(v, a._replace(masked=theirs[m])) for v, a in ours.following.items()}

    arrived = [0, 1, 2]  # client 3, who is no member for client 0, dropped out
    ours.unmasking = {m: ours.clients[m].unmask(arrived, pretended(m))[0] for m in arrived}
    if how == "members":
        ours.unmasking[0] = Shares(ours.unmasking[0].seeds, {3: bytes(SECRET)})
    del ours.masked[3]
    assert (ours.opened() != exact(ours)).all()


@pytest.mark.parametrize("masked", [None, NO_SUM, bytes([7]) * 32])
def test_a_server_cannot_say_that_numbers_arrived_if_nobody_signed_that_they_were_sent(masked):
    """With shares of the seed of client 2, and of its key from others, it would unmask what client 2 sends late."""
    ours = Sum(values(4), 3, {2: 2})
    ours.masks()
    if masked is not None:
        ours.following[2] = Participant(2, 3, Signer(ours.keys, 2)).advertise(masked)
    with pytest.raises(InputError, match="client 2 has not signed that it is in the same secure sum as this one"):
        ours.clients[0].unmask([0, 1, 2, 3], ours.following)


@pytest.mark.parametrize("arrived", [[0, 1, 3], [0, 1, 2, 4], [0, 1, 2, 9]])
def test_a_client_unmasks_no_sum_that_it_is_not_in_nor_with_those_who_are_not(arrived):
    ours = Sum(values(5), 3)
    ours.prepare()
    members = [0, 1, 2, 3]
    for m in members:
        ours.masked[m], ours.following[m] = ours.mask(m, members=members)
    with pytest.raises(InputError, match="is to be unmasked for clients that are not in it"):
        ours.clients[2].unmask(arrived, ours.following)


def test_exchanges_out_of_order_or_repeated_are_refused():
    ours = Sum(values(3), 2)
    client, adverts = ours.clients[0], ours.advertise()

    def refused(act, *args):
        with pytest.raises(InputError, match="out of order, or one is repeated"):
            act(*args)

    refused(client.advertise)
    refused(client.mask, {}, ASKED, ours.values[0])
    refused(client.unmask, [0, 1, 2], adverts)
    refused(lambda: client.following)
    ours.prepared = Prepared(adverts, {m: c.share(adverts) for m, c in ours.clients.items()})
    refused(client.share, adverts)
    ours.total()
    refused(ours.mask, 0)
    refused(client.unmask, ours.masked, ours.following)
    refused(client.following.share, ours.following)


def test_keys_are_used_up_by_an_attempt_that_fails():
    ours = Sum(values(3), 2)
    ours.prepare()
    sealed = ours.prepared.sealed_for(0, ours.members)
    with pytest.raises(InputError, match="changed on the way"):
        ours.clients[0].mask({**sealed, 1: bytes(len(sealed[1]))}, ASKED, ours.values[0])
    with pytest.raises(InputError, match="out of order, or one is repeated"):
        ours.mask(0)
