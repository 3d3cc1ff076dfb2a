"""Ways to deal samples to clients: nothing lost, nothing doubled, the same for the same seed, and each what it says it is."""

import numpy as np
import pytest

from fedbilevel.errors import InputError
from fedbilevel.tasks.data import partition
from fedbilevel.tasks.hyper_representation import HyperRepresentation
from fedbilevel.tasks.regularisation import Regularisation


def random_labels(seed):
    """Labels of a random number of classes, of very unequal sizes."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(30, 300, rng.integers(2, 11))
    return rng.permutation(np.repeat(np.arange(len(sizes)), sizes))


def check_dealt(parts, clients, samples):
    """Every sample has gone to exactly one client, and no client has none."""
    assert len(parts) == clients and min(map(len, parts)) >= 1
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(samples))


def same(parts, others):
    return all(np.array_equal(a, b) for a, b in zip(parts, others, strict=True))


WAYS = ["iid", "one-class", "shards:1", "shards:2", "shards:5", "classes:1", "classes:2", "dirichlet:0.001", "dirichlet:0.3"]


@pytest.mark.parametrize("way", [*WAYS, "dirichlet:100", "dirichlet:1e308", "dirichlet:0.001:9"])
@pytest.mark.parametrize("seed", range(8))
def test_every_sample_goes_to_exactly_one_client_and_the_seed_decides(way, seed):
    labels = random_labels(seed)
    for clients in (11, 23):
        parts = partition.deal(way, labels, clients, seed)
        check_dealt(parts, clients, len(labels))
        assert same(parts, partition.deal(way, labels, clients, seed))
        assert not same(parts, partition.deal(way, labels, clients, seed + 1))


@pytest.mark.parametrize("k", range(3, 11))
@pytest.mark.parametrize("seed", range(4))
def test_many_classes_per_client_lose_nothing(k, seed):
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(10), [400, 300, 50, 60, 70, 80, 90, 100, 110, 120]))
    for clients in (4, 7, 23):
        check_dealt(partition.deal(f"classes:{k}", labels, clients, seed), clients, len(labels))


@pytest.mark.parametrize(
    "way", ["iid", "one-class", "shards:1", "shards:2", "classes:1", "classes:2", "dirichlet:0.1", "dirichlet:9:1"]
)
def test_few_samples_are_dealt_without_loss_or_refused_in_one_line_that_names_the_way(way):
    dealt = 0
    for seed in range(3):
        for samples in (0, 1, 2, 3, 4, 7, 12, 20, 40, 59):
            labels = np.random.default_rng((seed, samples)).integers(0, 3, samples)
            for clients in (1, 2, 3, 4, 6, 12, 30):
                try:
                    check_dealt(partition.deal(way, labels, clients, seed), clients, samples)
                    assert clients <= samples
                    dealt += 1
                except InputError as error:
                    assert str(error).startswith(f"partition {way}: ") and "\n" not in str(error)
                    assert samples < 2 * clients or "class" in str(error)
    assert dealt > 60


@pytest.mark.parametrize(
    ("way", "each"),
    [("iid", 1), ("one-class", 1), ("shards:1000000", 1_000_000), ("classes:2", 1), ("dirichlet:1", 2), ("dirichlet:1:30", 30)],
)
def test_more_clients_than_samples_are_refused_at_once(way, each):
    for clients in (61, 2**31 - 1):
        with pytest.raises(InputError) as caught:
            partition.deal(way, np.arange(60) % 2, clients, 0)
        wanted = f"60 samples are too few for {clients} clients with at least {each} each: lower one of the two"
        assert str(caught.value) == f"partition {way}: {wanted}"
    with pytest.raises(
        InputError, match="partition one-class: client 5 of 6 gets no sample, as too many clients share its classes"
    ):
        partition.deal("one-class", np.array([0] * 50 + [1] * 2), 6, 0)


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
    assert min(map(len, partition.dirichlet(labels, 20, 1, 1e-3))) == 2
    for least in (1, 40, 250):  # 250 · 20 clients is every sample there is
        parts = partition.deal(f"dirichlet:0.001:{least}", labels, 20, 1)
        assert min(map(len, parts)) >= least and same(parts, partition.dirichlet(labels, 20, 1, 1e-3, least))
        check_dealt(parts, 20, 5000)
    with pytest.raises(InputError, match="5000 samples are too few for 20 clients with at least 251"):
        partition.dirichlet(labels, 20, 1, 1e-3, 251)


@pytest.mark.parametrize("seed", range(5))
def test_clients_of_a_skewed_deal_have_enough_to_train_and_to_validate(seed):
    task = Regularisation(partition="dirichlet:0.1", data_seed=seed).build()
    assert min(counts.sum(1).min() for counts in task.holdings.counts.values()) >= 1


def test_a_client_with_one_sample_is_said_with_what_to_raise():
    with pytest.raises(InputError, match=r"regularisation: client \d is dealt too few samples \(1; .* ALPHA or LEAST"):
        Regularisation(partition="dirichlet:0.001:1").build()


def test_groups_stay_whole():
    group = np.repeat(np.arange(33), np.random.default_rng(0).integers(14, 55, 33))
    parts = partition.groups(group, 11, 0)
    check_dealt(parts, 11, len(group))
    assert same(parts, partition.groups(group, 11, 0)) and not same(parts, partition.groups(group, 11, 1))
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
    np.testing.assert_array_equal(kept, partition.long_tail(labels, 6000, 0.01, 0))
    assert not np.array_equal(kept, partition.long_tail(labels, 6000, 0.01, 1))


def test_the_long_tail_keeps_all_where_there_is_no_limit_and_nothing_of_nothing():
    labels = random_labels(0)
    np.testing.assert_array_equal(partition.long_tail(labels, 300, 1, 0), np.arange(len(labels)))
    few = partition.long_tail(np.array([2, 7, 7, 2, 2]), 2, 0.1, 0)
    assert len(few) == len(set(few)) == 3
    none = partition.long_tail(np.zeros(0, np.int32), 10, 0.1, 0)
    assert none.shape == (0,)
    with pytest.raises(InputError, match="partition iid: 0 samples are too few for 2 clients"):
        partition.deal("iid", none, 2, 0)


NO_WAYS = ["shards", "shards:0", "shards:2:2", "classes:x", "dirichlet", "dirichlet:0", "dirichlet:nan", "iid:2", "by-moon", ""]


@pytest.mark.parametrize("way", [*NO_WAYS, "dirichlet:1:", "dirichlet:1:0", "dirichlet:1:1.5", "dirichlet:1:2:3"])
def test_unknown_ways_are_refused(way):
    with pytest.raises(InputError, match=r"partition must be iid, one-class, shards:S.*dirichlet:ALPHA\[:LEAST\]"):
        HyperRepresentation(partition=way)


def test_a_class_without_a_holder_is_refused():
    labels = np.arange(10)
    for way in ("classes:2", "one-class", "classes:11"):
        with pytest.raises(InputError, match=f"partition {way}: .*every class must have a holder"):
            partition.deal(way, labels, 4, 0)
