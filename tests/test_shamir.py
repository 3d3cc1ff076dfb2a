"""Shamir's secret sharing: enough shares make the secret, and fewer fit every secret."""

import itertools
import os

import pytest

from fedbilevel.engines.shamir import PRIME, SECRET, SHARE, combined, split


def test_any_shares_that_are_enough_make_the_secret_and_one_fewer_do_not():
    for secret in (bytes(SECRET), bytes([255]) * SECRET, os.urandom(SECRET)):
        shares = split(secret, 3, 6)
        assert {len(share) for share in shares} == {SHARE}
        for places in itertools.permutations(range(1, 7), 3):
            assert combined(places, [shares[k - 1] for k in places]) == secret
        for places in itertools.combinations(range(1, 7), 2):
            assert combined(places, [shares[k - 1] for k in places]) != secret


def test_shares_that_are_too_few_fit_every_secret():
    """For each guess of the secret there is one share in a further place that makes it: f through the shares and the guess."""
    shares = [int.from_bytes(share, "big") for share in split(os.urandom(SECRET), 3, 3)[:2]]
    for guess in (0, 1, 2**256 - 1):

        def f(x, guess=guess):  # through (0, guess), (1, the first share), (2, the second), with halves modulo the prime
            half = pow(2, -1, PRIME)
            terms = guess * (x - 1) * (x - 2) * half, shares[0] * x * (2 - x), shares[1] * x * (x - 1) * half
            return sum(terms) % PRIME

        made = combined((1, 2, 3), [value.to_bytes(SHARE, "big") for value in (*shares, f(3))])
        assert made == guess.to_bytes(SECRET, "big")


def test_shares_of_a_secret_are_unlike_each_time_and_fill_the_range():
    secret, least = bytes(SECRET), 2
    seen = [int.from_bytes(share, "big") for _ in range(200) for share in split(secret, least, 2)]
    assert len(set(seen)) == 400 and all(value < PRIME for value in seen)
    assert 0.3 < sum(value > PRIME // 2 for value in seen) / 400 < 0.7  # a fair coin is outside of it once in 10¹⁵


def test_the_modulus_is_a_prime_above_every_secret():
    assert PRIME > 2 ** (8 * SECRET) - 1 and PRIME < 2 ** (8 * SHARE)
    odd, twos = PRIME - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):  # Miller and Rabin's test
        powers = [pow(base, odd * 2**k, PRIME) for k in range(twos)]
        assert powers[0] == 1 or PRIME - 1 in powers


@pytest.mark.parametrize(
    ("secret", "least", "shares"), [(bytes(31), 2, 3), (bytes(33), 2, 3), (bytes(32), 4, 3), (bytes(32), 0, 3)]
)
def test_what_cannot_be_shared_is_refused(secret, least, shares):
    with pytest.raises(ValueError, match="shares of"):
        split(secret, least, shares)
