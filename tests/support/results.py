"""What tests read of results."""


def ids(results):
    """Return the tokens of each result."""
    return [r.token_ids for r in results]


def passes(results):
    """Return how many passes the target made for all results."""
    return sum(r.stats.target_passes for r in results)
