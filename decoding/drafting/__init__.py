"""Drafts and their ranking: chains, draft trees, bigram scores, Markov heads, prompt lookup."""
