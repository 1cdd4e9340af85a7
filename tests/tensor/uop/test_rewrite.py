"""Pattern matching and graph rewrite."""

from __future__ import annotations

import pytest

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import GroupOp, Ops, PatternMatcher, UOp, UPat, VarArg, graph_rewrite, rewrite
from manygrad.tensor.uop import symbolic as sym
from manygrad.tensor.uop.rewrite import rewrite_once

i64 = dtypes.int64


def c(n: int) -> UOp:
    return UOp.const(i64, n)


def v(name: str) -> UOp:
    return UOp(Ops.DEFINE_VAR, i64, (), VarArg(name, 0, 100))


x, y, z = v("x"), v("y"), v("z")


def test_a_pattern_matches_op_dtype_arg_and_sources() -> None:
    bound: dict[str, UOp] = {}
    pat = UPat(Ops.SUB, "u", (UPat.var("a"), UPat.const("k", 3)))
    assert pat.match(x.alu(Ops.SUB, c(3)), bound)
    assert bound == {"u": x.alu(Ops.SUB, c(3)), "a": x, "k": c(3)}
    for other in (x.alu(Ops.SUB, c(4)), x.alu(Ops.ADD, c(3)), c(3).alu(Ops.SUB, x), x.alu(Ops.SUB, y)):
        assert not pat.match(other, {})
    assert UPat(None, dtype=i64).match(x, {}) and not UPat(None, dtype=dtypes.float32).match(x, {})
    assert UPat((Ops.ADD, Ops.MUL)).match(x.alu(Ops.MUL, y), {}) and not UPat((Ops.ADD, Ops.MUL)).match(
        x.alu(Ops.SUB, y), {}
    )
    assert not UPat(Ops.ADD, src=(UPat.var("a"),)).match(x.alu(Ops.ADD, y), {})


def test_a_name_that_stands_twice_is_one_node() -> None:
    same = UPat(Ops.SUB, src=(UPat.var("a"), UPat.var("a")))
    assert same.match(x.alu(Ops.SUB, x), {})
    assert not same.match(x.alu(Ops.SUB, y), {})


def test_commutative_ops_match_in_both_orders_and_a_failed_try_binds_nothing() -> None:
    pat = UPat(Ops.ADD, src=(UPat(Ops.MUL, src=(UPat.var("a"), UPat.const("k"))), UPat.var("a")))  # a*k + a
    for u in (x.alu(Ops.MUL, c(2)).alu(Ops.ADD, x), x.alu(Ops.ADD, c(2).alu(Ops.MUL, x))):
        bound: dict[str, UOp] = {}
        assert pat.match(u, bound) and bound == {"a": x, "k": c(2)}
    bound = {"old": z}
    assert not pat.match(x.alu(Ops.MUL, c(2)).alu(Ops.ADD, y), bound)
    assert bound == {"old": z}
    assert not UPat(Ops.SUB, src=(UPat.const(), UPat.var("a"))).match(x.alu(Ops.SUB, c(1)), {})


def test_the_first_rule_that_changes_the_node_wins() -> None:
    log: list[str] = []

    def note(name: str, out: UOp | None) -> UOp | None:
        log.append(name)
        return out

    pm = PatternMatcher([(UPat(Ops.ADD), lambda: note("none", None)), (UPat(Ops.ADD, "u"), lambda u: note("same", u))])
    pm = pm + PatternMatcher([(UPat(Ops.ADD), lambda: note("one", c(1))), (UPat(Ops.ADD), lambda: note("two", c(2)))])
    assert pm.rewrite(x.alu(Ops.ADD, y)) is c(1)
    assert log == ["none", "same", "one"]
    assert pm.rewrite(x.alu(Ops.MUL, y)) is None


FOLD = PatternMatcher(
    [
        (UPat(Ops.ADD, src=(UPat.const("a"), UPat.const("b"))), lambda a, b: c(a.arg + b.arg)),
        (UPat(Ops.ADD, src=(UPat.var("a"), UPat.const(value=0))), lambda a: a),
        (UPat(Ops.MUL, src=(UPat.var("a"), UPat.const(value=1))), lambda a: a),
        (UPat(Ops.MUL, src=(UPat(), UPat.const("k", 0))), lambda k: k),
        (UPat(Ops.SUB, src=(UPat.var("a"), UPat.var("a"))), lambda a: c(0)),
    ]
)


def test_rewrites_to_the_fixed_point() -> None:
    """A rule's result is itself rewritten, sources first."""
    u = x.alu(Ops.SUB, x).alu(Ops.ADD, c(1)).alu(Ops.MUL, y).alu(Ops.ADD, c(0).alu(Ops.ADD, c(0)))
    assert graph_rewrite(u, FOLD) is y
    assert graph_rewrite(x.alu(Ops.ADD, y), FOLD) is x.alu(Ops.ADD, y)
    again = PatternMatcher([(UPat(Ops.CONST, "k"), lambda k: c(k.arg - 1) if k.arg > 0 else None)])
    assert graph_rewrite(c(500).alu(Ops.ADD, x), again) is c(0).alu(Ops.ADD, x)


def test_deep_and_shared_graphs(no_collection: None) -> None:
    u = x
    for _ in range(100_000):
        u = u.alu(Ops.ADD, c(0))
    assert graph_rewrite(u, FOLD) is x
    shared = x
    for _ in range(200):  # 2**200 paths
        shared = shared.alu(Ops.MUL, c(1)).alu(Ops.ADD, shared)
    seen: list[UOp] = []
    count = PatternMatcher([(UPat(Ops.ADD, "u"), lambda u: seen.append(u))])
    graph_rewrite(shared, count)
    assert len(seen) == 200


def test_context_is_passed_to_the_rules_that_ask() -> None:
    pm = PatternMatcher([(UPat(Ops.DEFINE_VAR, "u"), lambda ctx, u: ctx.get(u))])
    assert graph_rewrite(x.alu(Ops.ADD, y), pm, ctx={x: c(5)}) is c(5).alu(Ops.ADD, y)


def test_rebuild_chooses_how_changed_nodes_are_made() -> None:
    n = sym.variable("n", 0, 9)
    pm = PatternMatcher([(UPat(Ops.DEFINE_VAR), lambda: sym.iconst(3))])
    u = UOp(Ops.ADD, dtypes.index, (UOp(Ops.MUL, dtypes.index, (n, sym.iconst(4))), sym.iconst(1)))
    assert graph_rewrite(u, pm, over=sym.simplified) is sym.iconst(13)


def test_two_rules_that_undo_each_other_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "MAX_REWRITES", 10_000)
    grow = PatternMatcher([(UPat(Ops.CONST, "k"), lambda k: c(k.arg + 1))])
    with pytest.raises(AssertionError, match="does not end"):
        graph_rewrite(c(0), grow)


def test_every_op_has_one_group_of_arity() -> None:
    groups = (GroupOp.UNARY, GroupOp.BINARY, GroupOp.TERNARY, GroupOp.MOVEMENT)
    assert all(sum(op in g for g in groups) <= 1 for op in Ops)
    assert GroupOp.COMMUTATIVE < GroupOp.BINARY and GroupOp.COMPARE < GroupOp.BINARY


def test_once_each_node_is_seen_with_what_it_was_and_what_has_become_of_others() -> None:
    def double(u: UOp, old: UOp, done: dict[UOp, UOp], ctx: list[UOp]) -> UOp:
        ctx.append(old)
        assert u.src == tuple(done[s] for s in old.src)
        return u.alu(Ops.MUL, c(2))

    seen: list[UOp] = []
    pm = PatternMatcher([(UPat(Ops.ADD, "u"), double)])
    inner = x.alu(Ops.ADD, y)
    out = rewrite_once(inner.alu(Ops.ADD, z), pm, seen)
    assert seen == [inner, inner.alu(Ops.ADD, z)]
    assert out is inner.alu(Ops.MUL, c(2)).alu(Ops.ADD, z).alu(Ops.MUL, c(2))  # what a rule makes is not looked at


def test_once_through_a_deep_graph() -> None:
    u = x
    for _ in range(100_000):
        u = u.alu(Ops.NEG)
    out = rewrite_once(u, PatternMatcher([(UPat(Ops.NEG, "u"), lambda u: u.src[0])]))
    assert out is x
