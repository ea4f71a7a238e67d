"""What ranks drafts: draft trees, bigram scores, prompt lookup."""
