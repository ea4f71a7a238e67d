"""Requests that come and are cancelled while others are decoded."""

from decoding.engine.running import Running


def texts_of(sampler, params, prompts, seeds, events, prefill_tokens=None):
    """Return texts by request of a run in which requests come and are cancelled between cycles.

    Args:
        sampler: Decodes them.
        params: Of all requests.
        prompts, seeds: Of each request.
        events: For each cycle how many requests come first, and the number of one that is cancelled
            then (if it is there). Those that are left at the end come together.
        prefill_tokens: Tokens of a pass that prefills. Between two such passes those who are there
            go on.
    """
    prompts = [sampler.encode(p, params) for p in prompts]
    running = Running(sampler, params, sampler.capacity(prompts, params), prefill_tokens)
    waiting, found = [*range(len(prompts))], {}

    def step():
        if running:
            chunks = running.step(text=False)
            found.update({c.request: c.result.token_ids for c in chunks if c.result is not None})

    for come, cancelled in [*events, *[(len(prompts), -1)] * 99]:
        new, waiting = waiting[:come], waiting[come:]
        if new:
            of_new = ([of[n] for n in new] for of in (prompts, seeds))
            running.admit(new, *of_new, between=step if prefill_tokens else lambda: None)
        if cancelled in running.answers:
            running.leave([cancelled])
        if running:
            step()
        elif not waiting:
            return found
    raise AssertionError("requests are left")
