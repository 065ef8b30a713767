"""Namespaces that one gateway tells another of: derived anew, or not known at all."""

from __future__ import annotations

from dataclasses import replace

from test_tenancy import ALICE, OTHER, TENANT, Desk, Index, Kept, asked, derive

from trunkline.control.sibling_words import heard, told
from trunkline.core.epochs import EpochTable
from trunkline.core.handover import Lineage
from trunkline.core.identity import Epochs, Namespace, Scope, ScopeKind, derive_namespace
from trunkline.gateway.namespaces import Namespaces


def a_lineage(scope: ScopeKind = ScopeKind.TENANT) -> Lineage:
    """As one gateway tells it of a namespace that a request came for."""
    kept = Kept(8)
    lineage = kept.namespaces.lineage(kept.use(asked(ALICE, scope)))
    assert lineage is not None
    on_the_wire = heard(told(lineage))
    assert on_the_wire == lineage
    return lineage


def test_what_is_told_is_what_a_request_would_have_made() -> None:
    for scope in (ScopeKind.TENANT, ScopeKind.USER):
        here, lineage = Kept(8), a_lineage(scope)
        assert here.namespaces.take_in(lineage, EpochTable())
        assert here.index.admitted[lineage.tag] == 1
        assert here.use(asked(ALICE, scope)) == lineage.tag
        assert (here.index.admitted[lineage.tag], len(here.namespaces)) == (1, 1)
        assert here.namespaces.take_in(lineage, EpochTable()), "it is known already"


def test_an_epoch_that_was_raised_here_makes_it_unknown() -> None:
    here, lineage = Kept(8), a_lineage()
    raised = EpochTable().raised(TENANT, 1, rev=1, bars=False)
    assert not here.namespaces.take_in(lineage, raised)
    assert (len(here.namespaces), here.index.admitted.total()) == (0, 0)


def test_one_that_was_told_goes_when_its_epoch_is_raised() -> None:
    here, lineage = Kept(8), a_lineage()
    assert here.namespaces.take_in(lineage, EpochTable())
    assert here.namespaces.retire_stale(EpochTable().raised(TENANT, 1, rev=1, bars=True)) == 1
    assert here.index.retired == [lineage.tag]
    assert here.namespaces.lineage(lineage.tag) is None


def test_who_has_another_secret_or_model_knows_nothing_by_it() -> None:
    def otherwise(scope: Scope, epochs: Epochs, block_tokens: int, adapter: str) -> Namespace:
        made = derive(scope, epochs, block_tokens, adapter)
        return derive_namespace(b"q" * 32, scope, made.model, epochs)

    index = Index()
    here = Namespaces(otherwise, index, draw=Desk().draw)
    lineage = a_lineage()
    assert not here.take_in(lineage, EpochTable())
    assert not Kept(8).namespaces.take_in(replace(lineage, adapter="a"), EpochTable())
    assert not index.admitted


def test_none_that_is_in_use_goes_for_one_that_was_only_told() -> None:
    here, lineage = Kept(1), a_lineage()
    here.use(asked(OTHER))
    assert not here.namespaces.take_in(lineage, EpochTable())
    assert here.index.retired == []
