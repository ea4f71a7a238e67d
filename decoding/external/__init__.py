"""Engines that others wrote: what of theirs decodes here, for comparison and as a teacher."""
