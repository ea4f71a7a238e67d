import torch

# Tiny models: a second thread only waits (and `make test` shares the machine's cores among workers).
torch.set_num_threads(1)
