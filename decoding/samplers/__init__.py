"""One sampler a method; `decoding.load` finds a sampler by the method name of an export."""
