"""Ways to deal samples to clients: nothing lost, nothing doubled, the same for the same seed, and each what it says it is."""

import numpy as np
import pytest

from fedbilevel.data import partition
from fedbilevel.errors import InputError


def random_labels(seed):
    """Labels of a random number of classes, of very unequal sizes."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(30, 300, rng.integers(2, 11))
    return rng.permutation(np.repeat(np.arange(len(sizes)), sizes))


WAYS = ["iid", "one-class", "shards:1", "shards:2", "shards:5", "classes:1", "classes:2", "dirichlet:0.001", "dirichlet:0.3"]


@pytest.mark.parametrize("way", [*WAYS, "dirichlet:100"])
@pytest.mark.parametrize("seed", range(8))
def test_every_sample_goes_to_exactly_one_client_and_the_seed_decides(way, seed):
    labels = random_labels(seed)
    for clients in (11, 23):
        parts = partition.deal(way, labels, clients, seed)
        assert len(parts) == clients
        np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
        again, other = partition.deal(way, labels, clients, seed), partition.deal(way, labels, clients, seed + 1)
        assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
        assert any(not np.array_equal(a, b) for a, b in zip(parts, other, strict=True))


def held(labels, parts):
    return [set(labels[part]) for part in parts]


def test_iid_parts_are_equal_and_have_every_class():
    labels = np.repeat(np.arange(10), 100)
    parts = partition.iid(labels, 10, 0)
    assert {len(p) for p in parts} == {100}
    assert all(classes == set(range(10)) for classes in held(labels, parts))


def test_shards_are_the_papers():
    labels = np.repeat(np.arange(10), 6000)
    parts = partition.shards(labels, 100, 0, 2)
    assert {len(p) for p in parts} == {600}
    assert all(len(classes) <= 2 for classes in held(labels, parts))
    one = partition.shards(labels, 100, 0, 1)
    assert all(len(classes) == 1 for classes in held(labels, one))


@pytest.mark.parametrize("k", range(1, 11))
def test_k_classes_per_client_evenly(k):
    labels = np.repeat(np.arange(10), 600)
    parts = partition.classes(labels, 30, 0, k)
    assert all(len(classes) == k for classes in held(labels, parts))
    holders = np.bincount([c for classes in held(labels, parts) for c in classes], minlength=10)
    assert set(holders) == {3 * k}
    assert max(map(len, parts)) - min(map(len, parts)) <= k
    if 2 <= k <= 8:  # not the same few combinations again and again
        assert len({frozenset(classes) for classes in held(labels, parts)}) > 10


def test_one_class_per_client_is_the_clients_own_number():
    labels = random_labels(0) % 4
    for m, classes in enumerate(held(labels, partition.one_class(labels, 9, 0))):
        assert classes == {m % 4}


def test_dirichlet_follows_alpha_and_never_leaves_a_client_below_the_least():
    labels = np.repeat(np.arange(10), 500)

    def evenness(alpha):
        parts = partition.dirichlet(labels, 20, 0, alpha)
        shares = np.stack([np.bincount(labels[p], minlength=10) for p in parts]) / 500
        return (shares**2).sum(0).mean()  # 1/20 where all have the same, 1 where one client has the class

    small, middle, large = evenness(1e-3), evenness(0.5), evenness(1e4)
    assert small > 0.95 and large < 0.052
    expected = (0.5 + 1) / (20 * 0.5 + 1)  # E Σ p² of Dirichlet(α, ..., α) is (α + 1)/(Kα + 1)
    assert abs(middle - expected) < 0.3 * expected
    for least in (1, 40, 250):  # 250 · 20 clients is every sample there is
        parts = partition.dirichlet(labels, 20, 1, 1e-3, least)
        assert min(map(len, parts)) >= least
        np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(5000))
    with pytest.raises(InputError, match="5000 samples are too few for 20 clients with at least 251"):
        partition.dirichlet(labels, 20, 1, 1e-3, 251)


def test_groups_stay_whole():
    group = np.repeat(np.arange(33), np.random.default_rng(0).integers(14, 55, 33))
    parts = partition.groups(group, 11, 0)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(group)))
    assert all(len(set(group[p])) == 3 for p in parts)
    assert sum(len(set(group[p])) for p in parts) == 33  # nobody shares one
    with pytest.raises(InputError, match="33 groups are too few for 34 clients"):
        partition.groups(group, 34, 0)


def test_the_long_tail_is_the_papers():
    mnist = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]  # images of each digit
    labels = np.repeat(np.arange(10), mnist)
    kept = partition.long_tail(labels, 6000, 0.01, 0)
    counts = np.bincount(labels[kept])
    assert len(kept) == 14_818 and counts[0] == 5923 and counts[-1] == 61
    assert list(counts) == sorted(counts, reverse=True)
    assert len(set(kept)) == len(kept)


@pytest.mark.parametrize("way", ["shards", "shards:0", "classes:x", "dirichlet:0", "dirichlet:nan", "iid:2", "by-moon", ""])
def test_unknown_ways_are_refused(way):
    from fedbilevel.tasks.hyper_representation import HyperRepresentation

    with pytest.raises(InputError, match="partition must be iid, one-class, shards:S"):
        HyperRepresentation(partition=way)


def test_a_class_without_a_holder_is_refused():
    labels = np.arange(10)
    for way in ("classes:2", "one-class", "classes:11"):
        with pytest.raises(InputError, match="every class must have a holder"):
            partition.deal(way, labels, 4, 0)
