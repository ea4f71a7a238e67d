#!/bin/sh
# Acceptance by context: a drafter of SmolLM2-135M-Instruct that was trained on rows of 256 tokens.
#
# Seven of the target's layers in PARD's layout, trained on the standard library's text in rows of
# 256 tokens, with and without a window of 256: the window is as long as a row, so both trainings
# are the same. Both are measured in texts of up to 8,000 tokens, and so is the target's own loss by
# position, past the 8,192 tokens that it was trained at.
