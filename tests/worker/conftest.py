"""One torch thread: tests run beside each other, and two spinning pools on two cores crawl."""

import torch

torch.set_num_threads(1)
