"""The all-reduce of `launch.py` as a script for torchrun."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
dist.destroy_process_group()
