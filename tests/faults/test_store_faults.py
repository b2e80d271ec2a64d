"""S3 that refuses, is slow, is full, or whose answers are lost: injected by a proxy before the real store."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from tests.faults.harness import Chain, Field, Row
from tests.faults.proxy import PASS, Fault, Proxy, Rule, proxy_before

pytestmark = pytest.mark.system

ALL_WRITES = 12  # more than a promotion makes; the sweep ends at the first that is not reached


@pytest.fixture(scope="module")
def proxy(shared: Field) -> Iterator[Proxy]:
    with proxy_before(shared.connections.s3_endpoint) as proxy:
        yield proxy


def promote_through(proxy: Proxy, chain: Chain, rule: Rule) -> tuple[bool, str]:
    """A promotion whose every request to the production bucket passes the proxy."""
    policy = chain.policy()
    proxy.obey(rule)
    ended = chain.field.promotion(policy, s3_endpoint=proxy.address).wait()
    assert not ended.killed
    return ended.completed, ended.sentence


def test_lost_answers_are_survived_without_help(chain: Chain, proxy: Proxy, row: Row) -> None:
    row.fault = "S3's answer to a write is lost, for every write of a promotion once"
    lost: set[str] = set()

    def rule(method: str, path: str, writes: int) -> Fault:
        if method != "PUT" or path in lost:
            return PASS
        lost.add(path)
        return Fault(lose_answer=True)

    completed, sentence = promote_through(proxy, chain, rule)
    assert completed, sentence
    assert proxy.faults >= 6
    row.remark = f"{proxy.faults} writes"
    chain.field.survived(chain.region, row)


@pytest.mark.faults
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("status", "what", "nths"),
    [
        (507, "full: it answers 507 to every write", range(ALL_WRITES)),
        (403, "no longer accepting the keys: it answers 403 to everything", (0, 2, 4, 6)),
        (503, "overloaded: it answers 503 to everything", (0, 2, 4, 6)),
    ],
    ids=["507", "403", "503"],
)
def test_the_store_refuses_from_the_nth_write_on(
    chain: Chain, proxy: Proxy, row: Row, status: int, what: str, nths: Sequence[int]
) -> None:
    row.fault = f"S3 {what}, from the n-th write of a promotion on"
    reached = True
    for nth in nths:
        down = False

        def rule(method: str, path: str, writes: int, nth: int = nth) -> Fault:
            nonlocal down
            down = down or (method == "PUT" and writes >= nth)
            refused = down and (method == "PUT" or status != 507)
            return Fault(refuse=status) if refused else PASS

        promote_through(proxy, chain, rule)
        reached = proxy.faults > 0
        chain.field.survived(chain.region, row)
        if not reached:
            break
    assert reached == (status != 507), "the sweep covers every write of a promotion"


@pytest.mark.faults
def test_half_a_body(chain: Chain, proxy: Proxy, row: Row) -> None:
    row.fault = "the connection to S3 breaks in the middle of a body, for every write once"
    cut: set[str] = set()

    def rule(method: str, path: str, writes: int) -> Fault:
        if method != "PUT" or path in cut:
            return PASS
        cut.add(path)
        return Fault(cut_request=True)

    completed, sentence = promote_through(proxy, chain, rule)
    assert completed, sentence
    chain.field.survived(chain.region, row)


@pytest.mark.faults
def test_a_slow_store(chain: Chain, proxy: Proxy, row: Row) -> None:
    row.fault = "S3 slow: 0.5 s more for each request"
    completed, sentence = promote_through(proxy, chain, lambda method, path, writes: Fault(delay=0.5))
    assert completed, sentence
    row.remark = f"{proxy.faults} requests"
    chain.field.survived(chain.region, row)


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_bad_day(chain: Chain, proxy: Proxy, row: Row) -> None:
    row.fault = "S3 at random: one request in five refused, cut, unanswered or late"
    for seed in range(5):
        dice = random.Random(seed)

        def rule(method: str, path: str, writes: int, dice: random.Random = dice) -> Fault:
            cut = Fault(cut_request=True) if method == "PUT" else Fault(lose_answer=True)
            faults = (Fault(refuse=503), Fault(refuse=500), Fault(lose_answer=True), Fault(delay=1), cut)
            return dice.choice(faults) if dice.random() < 0.2 else PASS

        promote_through(proxy, chain, rule)
        chain.field.survived(chain.region, row)
