"""What ranks drafts: draft trees, bigram scores, Markov heads, prompt lookup."""
