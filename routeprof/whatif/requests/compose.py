"""Which requests share a batch: three ways to compose batches of the same requests."""

from __future__ import annotations

import numpy as np

from routeprof.metrics._arrays import FloatArray, IntArray


def fifo(members: IntArray, size: int) -> IntArray:
    """Neighbours in the order of arrival.

    Args:
        members: places of requests, [requests], a multiple of the size.

    Returns:
        The same places, ``[batches, size]``.
    """
    return members.reshape(-1, size)


def shuffled(members: IntArray, size: int, random: np.random.Generator) -> IntArray:
    """Whoever chance puts together; arguments and result as of `fifo`."""
    return random.permutation(members).reshape(-1, size)


def load_aware(members: IntArray, expected: FloatArray, size: int) -> IntArray:
    """Requests of different routing together, greedily.

    The request whose expected load deviates most from the others' is placed first. Each goes to the
    batch, among those with room, that it leaves least uneven: Σ over batches of the squared sum of
    their requests' deviations grows least.

    Args:
        expected: what is expected of each member, ``[requests, features]``.

    Returns:
        Places of requests, ``[batches, size]``.
    """
    deviation = expected - expected.mean(axis=0)
    order = np.argsort(-(deviation**2).sum(axis=1), kind="stable")
    batches = np.empty((len(members) // size, size), dtype=np.int64)
    sums = np.zeros((len(batches), deviation.shape[1]))
    filled = np.zeros(len(batches), dtype=np.int64)
    for one in order:
        # No matrix product: it would wake threads for little work.
        growth = np.where(filled < size, (sums * deviation[one]).sum(axis=1), np.inf)
        batch = int(growth.argmin())
        batches[batch, filled[batch]] = members[one]
        sums[batch] += deviation[one]
        filled[batch] += 1
    return batches
