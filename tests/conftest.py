import pytest
import torch

from tests.support.lab import Lab

# Tiny models: a second thread only waits (and `make test` shares the cores among workers).
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """The whole chain of the lab scale, made once: do not change what it holds."""
    lab = Lab(tmp_path_factory.mktemp("lab"))
    lab.fit("ar_target")
    lab.fit("diffusion_adapt")
    lab.collect()
    lab.fit("deer_stage1")
    lab.fit("deer_stage2")
    return lab
