"""Policies, manifests and the ledger on a real S3: numbered, append-only, chained."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest

from accounting.errors import InvalidInput
from infra.ledger_store import LedgerStore
from infra.object_store import Changed, Corrupted, Missing, ObjectStore
from infra.policies import ManifestStore, PolicyStore

Fields = Callable[..., dict[str, Any]]


# Policies


def test_policies_are_numbered_and_kept(object_store: ObjectStore, name: str, policy_fields: Fields) -> None:
    store = PolicyStore(object_store)
    assert store.newest(name) is None
    first, second = store.append(policy_fields()), store.append(policy_fields(epsilon=1.5))
    assert (first.serial, second.serial) == (1, 2)
    assert store.newest(name) == second
    assert store.read(name, 1) == first
    assert name in store.regions()
    assert object_store.list(f"policies/{name}/") == [f"policies/{name}/0000000{n}.json" for n in (1, 2)]


def test_the_same_terms_again_are_the_same_policy(object_store: ObjectStore, policy_fields: Fields) -> None:
    store = PolicyStore(object_store)
    first = store.append(policy_fields())
    assert store.append(policy_fields(author="another")) == first
    assert store.append(policy_fields(), new=True).serial == 2
    assert store.append(policy_fields(epsilon=1.5)).serial == 3
    assert store.append(policy_fields()).serial == 4  # not the newest policy's terms any more


def test_a_policy_to_come_is_moved_by_asking_for_another_time(
    object_store: ObjectStore, name: str, policy_fields: Fields
) -> None:
    store = PolicyStore(object_store)
    first = store.append(policy_fields(effective_at="2101-01-01T00:00:00Z"))
    assert store.append(policy_fields(effective_at="2101-01-01T00:00:00Z")) == first
    later = store.append(policy_fields(effective_at="2102-01-01T00:00:00Z"))
    assert (later.serial, later.effective_at.year) == (2, 2102)
    assert store.append(policy_fields(effective_at="2101-06-01T00:00:00Z")).serial == 3
    assert store.append(policy_fields()).serial == 4  # now
    assert store.append(policy_fields()).serial == 4


def test_a_bad_policy_is_not_stored(object_store: ObjectStore, name: str, policy_fields: Fields) -> None:
    store = PolicyStore(object_store)
    with pytest.raises(InvalidInput, match="policy: epsilon"):
        store.append(policy_fields(epsilon=0))
    with pytest.raises(InvalidInput, match="policy: region"):
        store.append(policy_fields(region="../eu"))
    assert store.newest(name) is None


def test_an_unknown_policy_is_a_sentence(object_store: ObjectStore, name: str) -> None:
    with pytest.raises(Missing, match=f"no policy 7 of region {name}"):
        PolicyStore(object_store).read(name, 7)


def test_two_writers_of_the_same_policy_get_one(object_store: ObjectStore, policy_fields: Fields) -> None:
    store = PolicyStore(object_store)
    with ThreadPoolExecutor(8) as pool:
        policies = list(pool.map(lambda _: store.append(policy_fields()), range(8)))
    assert {policy.serial for policy in policies} == {1}


def test_a_policy_under_another_key_is_refused(
    object_store: ObjectStore, name: str, policy_fields: Fields
) -> None:
    store = PolicyStore(object_store)
    policy = store.append(policy_fields())
    object_store.put(f"policies/{name}/00000002.json", policy.content())
    with pytest.raises(Corrupted, match=f"holds number 1 of {name}"):
        store.newest(name)


# Portfolio manifests


def test_manifests_resolve(object_store: ObjectStore, name: str, manifest_fields: Fields) -> None:
    store = ManifestStore(object_store)
    with pytest.raises(Missing, match="remerge train"):
        store.resolve(f"{name}@latest")
    first, second = store.append(manifest_fields()), store.append(manifest_fields())
    assert (first.reference, second.reference) == (f"{name}@1", f"{name}@2")
    assert store.resolve(f"{name}@1") == store.read(name, 1) == first
    assert store.resolve(f"{name}@latest") == store.newest(name) == second
    assert name in store.names()
    with pytest.raises(Missing, match=f"{name}@3"):
        store.resolve(f"{name}@3")


@pytest.mark.parametrize(
    "reference", ["digits", "digits@", "@1", "digits@0", "digits@x", "digits@-1", "digits@²"]
)
def test_a_bad_reference_is_refused(object_store: ObjectStore, reference: str) -> None:
    with pytest.raises(InvalidInput, match="name@number"):
        ManifestStore(object_store).resolve(reference)


# The ledger


def test_eight_writers_leave_no_gap_and_lose_nothing(
    object_store: ObjectStore, name: str, ledger_fields: Fields
) -> None:
    store = LedgerStore(object_store)
    with ThreadPoolExecutor(8) as pool:
        written = list(pool.map(lambda number: store.append(ledger_fields(number)), range(24)))
    entries = store.entries(name)
    assert [entry.serial for entry in entries] == list(range(1, 25))
    assert {entry.release_id for entry in entries} == {f"{number:064x}" for number in range(24)}
    assert sorted(written, key=lambda entry: entry.serial) == entries
    assert entries[0].previous_digest is None
    for earlier, later in pairwise(entries):
        assert later.previous_digest == earlier.sha256()


def test_append_once(object_store: ObjectStore, name: str, ledger_fields: Fields) -> None:
    store = LedgerStore(object_store)
    first = store.append_once(ledger_fields(1))
    assert store.append_once(ledger_fields(1)) == first
    assert store.append_once(ledger_fields(1, kind="live")).serial == 2
    assert store.append_once(ledger_fields(1, certificate_digest="7" * 64)).serial == 3
    assert store.append_once(ledger_fields(2)).serial == 4
    assert store.append_once(ledger_fields(1)) == first
    assert len(store.entries(name)) == 4
    assert name in store.lineages()


def test_a_share_that_was_decided_on_an_older_ledger_is_refused(
    object_store: ObjectStore, name: str, ledger_fields: Fields
) -> None:
    """Eight regions see the same rest of a budget: one gets it, and the others are told to decide anew."""
    store = LedgerStore(object_store)
    store.append(ledger_fields(0))

    def reserve(number: int) -> bool:
        fields = ledger_fields(number, kind="reserved", certificate_digest=None, counted=1)
        try:
            return store.append_once(fields, after=1).serial == 2
        except Changed:
            return False

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(reserve, range(1, 9)))
    assert sum(won) == 1
    entries = store.entries(name)
    assert len(entries) == 2
    again = store.append_once(
        ledger_fields(won.index(True) + 1, kind="reserved", certificate_digest=None, counted=1), after=1
    )
    assert again == entries[1]  # a retry of the winner finds its share


def test_two_promoters_of_a_release_count_the_same_past(
    object_store: ObjectStore, name: str, ledger_fields: Fields
) -> None:
    """The one that is second, after another release came between, is told to decide anew after the first one's past."""
    store = LedgerStore(object_store)
    store.append(ledger_fields(0))
    first = store.append_once(ledger_fields(1, counted=1))
    with pytest.raises(Changed, match="after another past"):
        store.append_once(ledger_fields(1, counted=2, certificate_digest="7" * 64))
    assert store.append_once(ledger_fields(1, counted=1)) == first
    assert len(store.entries(name)) == 2


def test_what_has_no_certificate_yet_may_be_planned_anew(
    object_store: ObjectStore, name: str, ledger_fields: Fields
) -> None:
    store = LedgerStore(object_store)
    outcome = ledger_fields(1)["outcomes"][0]
    other = [{**outcome, "name": "another"}]
    for kind, first in (("reserved", 1), ("consulted", 4)):
        fields = ledger_fields(1, kind=kind, certificate_digest=None)
        assert store.append_once(fields).serial == first
        assert store.append_once(fields).serial == first
        assert store.append_once({**fields, "outcomes": other, "counted": 2}).serial == first + 1
        assert store.append_once({**fields, "counted": 3}, again=True).serial == first + 2
    assert store.append_once(ledger_fields(1, counted=6), after=6).serial == 7
    with pytest.raises(InvalidInput, match="with another plan"):
        store.append_once(ledger_fields(1, counted=6, certificate_digest="7" * 64, outcomes=other))
    assert len(store.entries(name)) == 7


def test_append_once_by_many_writers(object_store: ObjectStore, name: str, ledger_fields: Fields) -> None:
    store = LedgerStore(object_store)
    with ThreadPoolExecutor(8) as pool:
        entries = list(pool.map(lambda number: store.append_once(ledger_fields(number % 2)), range(16)))
    assert {entry.serial for entry in entries} == {1, 2}
    assert len(store.entries(name)) == 2


def test_find(object_store: ObjectStore, name: str, ledger_fields: Fields) -> None:
    store = LedgerStore(object_store)
    assert store.find(name, f"{1:064x}", "live") is None
    for kind in ("intended", "live", "intended"):
        store.append(ledger_fields(1, kind=kind))
    assert store.find(name, f"{1:064x}", "live").serial == 2
    assert store.find(name, f"{1:064x}", "intended").serial == 3
    assert store.find(name, f"{1:064x}", "failed_check") is None
    assert store.find(name, f"{2:064x}", "live") is None


def test_an_edited_entry_breaks_the_chain(
    object_store: ObjectStore, name: str, ledger_fields: Fields
) -> None:
    store = LedgerStore(object_store)
    for number in range(3):
        store.append(ledger_fields(number))
    key = f"ledger/{name}/00000002.json"
    fields = json.loads(object_store.read(key).content)
    object_store.put(key, json.dumps({**fields, "drawn": "epsilon-8"}).encode())
    for broken in (store.entries, lambda lineage: store.append_once(ledger_fields(3))):
        with pytest.raises(Corrupted, match=f"broken at ledger/{name}/00000003.json"):
            broken(name)


def test_a_removed_entry_is_noticed(object_store: ObjectStore, name: str, ledger_fields: Fields) -> None:
    store = LedgerStore(object_store)
    for number in range(3):
        store.append(ledger_fields(number))
    object_store._client.delete_object(Bucket=object_store.bucket, Key=f"ledger/{name}/00000002.json")
    for broken in (store.entries, lambda lineage: store.append(ledger_fields(3))):
        with pytest.raises(Corrupted, match=r"00000002.json next, but holds 00000003.json"):
            broken(name)


def test_a_bad_entry_is_not_stored(object_store: ObjectStore, name: str, ledger_fields: Fields) -> None:
    store = LedgerStore(object_store)
    for bad in ({"kind": "perhaps"}, {"outcomes": []}, {"release_id": uuid.uuid4().hex}, {"extra": 1}):
        with pytest.raises(InvalidInput, match=f"ledger entry: {next(iter(bad))}"):
            store.append(ledger_fields(1, **bad))
    assert store.entries(name) == []
