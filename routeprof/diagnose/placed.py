"""Rules on where experts are: ranks that get more than others, sends that leave the node."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from routeprof.diagnose.finding import Finding
from routeprof.diagnose.question import Question
from routeprof.errors import UsageError
from routeprof.metrics._arrays import FloatArray, IntArray
from routeprof.metrics.ranks import rank_loads, rank_of_slot
from routeprof.placements import placed
from routeprof.tables import moe_layers

if TYPE_CHECKING:
    from routeprof.whatif.comparison import Comparison, RankBalance

NO_RANKS = "the recording tells of no expert-parallel ranks: pass --gpus"


def rank_imbalance(question: Question) -> list[Finding] | str:
    """Ranks of today's placement, loads of the whole selection added up."""
    from routeprof.whatif.today import todays

    ranks, limit = question.ranks, question.limits.rank_imbalance
    if ranks is None:
        return NO_RANKS
    if ranks == 1:
        return []
    today = todays(question.profile, ranks)
    found = {
        layer.index: _over_mean(question, position, placed(layer), today.slots[layer.index], ranks)
        for position, layer in moe_layers(question.profile)
        if layer.index in today.slots
    }
    ratios = {index: value for index, value in found.items() if not np.isnan(value)}
    if not ratios:
        return f"no layer has experts and tokens enough for {ranks} ranks: record more"
    mean, worst = float(np.mean(list(ratios.values()))), max(ratios, key=lambda one: ratios[one])
    if mean <= limit:
        return []
    return [
        Finding(
            "rank-imbalance",
            "warning",
            f"of {ranks} ranks ({today.name} placement) the fullest gets {mean:.2f} times the mean "
            f"on average over the layers, {ratios[worst]:.2f} in layer {worst}; the others wait",
            "place the experts by load, with replicas of the hot ones: routeprof whatif placement",
            tuple(sorted(index for index, value in ratios.items() if value > limit)),
            figures={
                "ranks": ranks,
                "rank_load_over_mean": mean,
                "worst_layer": worst,
                "rank_load_over_mean_worst": ratios[worst],
            },
        )
    ]


def _over_mean(
    question: Question, position: int, experts: int, slots: IntArray, ranks: int
) -> float:
    counts = question.profile.totals.lists["counts"][:, position, :experts].sum(0)
    if not counts.sum() or counts.sum() / ranks < question.limits.min_load:
        return float("nan")
    loads = rank_loads(counts, slots, ranks)
    return float(loads.max() / loads.mean())


def placement_gain(question: Question) -> str:
    """Fullest ÷ mean rank with experts placed anew, without replicas and with one for each GPU."""
    from routeprof.whatif.cluster import Cluster
    from routeprof.whatif.comparison import compare

    ranks, found = question.ranks, []
    most = max((placed(layer) for _, layer in moe_layers(question.profile)), default=0)
    if ranks is None or ranks < 2 or most < ranks:
        return ""
    even = -(-most // ranks) * ranks
    made: Comparison | None = None
    for slots in (even, even + ranks):
        try:
            made = compare(question.profile, Cluster.even(ranks, slots), effort="low")
        except UsageError:
            return ""
        found.append((_judged(made).means()["routeprof"], slots))
    if made is None:
        return ""
    on = "on later steps" if made.held_out else "on the loads that it was fitted on"
    before = _judged(made).means()["before"]
    said = " or ".join(f"{value:.2f} with {slots} slots" for value, slots in found)
    if min(found)[0] >= before:
        return (
            f"no placement found helps: the fullest rank would have {said} instead of {before:.2f} "
            f"times the mean, {on}"
        )
    return f"the fullest rank would have {said} instead of {before:.2f} times the mean, {on}"


def _judged(made: Comparison) -> RankBalance:
    return made.held_out or made.fitted


# -- between nodes


def cross_node(question: Question) -> list[Finding] | str:
    """Sends of dispatch that leave the node, of the ranks and hosts that were recorded."""
    nodes = _node_of_rank(question)
    if isinstance(nodes, str):
        return nodes
    counted = [_sends(question, layer.index, nodes) for _, layer in moe_layers(question.profile)]
    known = [own for own in counted if own is not None]
    sends, cross, relayed, tokens = np.sum(known, axis=0) if known else np.zeros(4)
    if not sends:
        return "no token was sent from rank to rank"
    share, limit = cross / sends, question.limits.cross_node_share
    if share <= limit:
        return []
    random = _at_random(nodes)
    return [
        Finding(
            "cross-node",
            "warning",
            f"{share:.0%} of the sends from rank to rank leave the node, {cross / tokens:.2f} for "
            f"each token and layer; experts chosen at random would make it {random:.0%}",
            "keep groups of experts that tokens choose together on one node (routeprof whatif "
            "placement --nodes --groups), or send once to each node and pass on inside",
            figures={
                "cross_node_share": float(share),
                "cross_node_sends_per_token": float(cross / tokens),
                "cross_node_share_at_random": random,
            },
            gain=f"sent once to each node, {relayed / tokens:.2f} sends for each token and layer "
            f"would leave it instead of {cross / tokens:.2f}",
        )
    ]


def _node_of_rank(question: Question) -> IntArray | str:
    """The node of each expert-parallel rank, ``[ranks]``."""
    profile = question.profile
    hosts: dict[int, str] = {}
    for rank in profile.files.ranks if profile.files else ():
        if rank.state is not None and rank.run == 0:
            hosts[rank.state.role.ep] = rank.state.host
    names = sorted(set(hosts.values()))
    if len(names) < 2:
        return "needs ranks of several nodes in one recording"
    if not profile.has("tokens"):
        return "needs tokens: record with level='tokens'"
    if set(hosts) != set(range(len(hosts))):
        return "some expert-parallel ranks wrote nothing: record them all"
    return np.array([names.index(hosts[number]) for number in range(len(hosts))])


def _sends(question: Question, index: int, nodes: IntArray) -> FloatArray | None:
    """Sends to other ranks, to other nodes, pairs of token and other node, and tokens."""
    from routeprof.whatif.today import todays
    from routeprof.whatif.traffic import executed_slots, reached

    profile, ranks = question.profile, len(nodes)
    slots = todays(profile, ranks).slots.get(index)
    table = profile.tokens(index)
    if slots is None or not len(table.step):
        return None
    homes = {
        rank.number: rank.state.role.ep
        for rank in (profile.files.ranks if profile.files else ())
        if rank.state is not None and rank.run == 0
    }
    numbers, place = np.unique(table.rank, return_inverse=True)
    home = np.array([homes.get(int(number), -1) for number in numbers])[place]
    mine = home >= 0
    slot = executed_slots(table.ids[mine], table.step[mine], slots)
    rank = np.where(slot >= 0, rank_of_slot(len(slots), ranks)[slot], -1)
    row, target = reached(rank)
    source = home[mine][row]
    away = nodes[target] != nodes[source]
    pairs = np.unique(row[away] * len(nodes) + nodes[target[away]])
    return np.array([(target != source).sum(), away.sum(), len(pairs), mine.sum()], dtype=float)


def _at_random(nodes: IntArray) -> float:
    """Share of other ranks that are on another node, mean over ranks."""
    same = (nodes[:, np.newaxis] == nodes).sum(axis=1)
    return float(((len(nodes) - same) / (len(nodes) - 1)).mean())
