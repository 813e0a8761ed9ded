"""The digits training, written for Horovod years ago: only its import is changed."""

from typing import Any


def train(data: dict[str, Any], epochs: int = 25) -> dict[str, Any]:
    """Trains on every rank; rank 0's weights are the result.

    Args:
        data: What `digits.prepare` returned.
        epochs: Passes over the training scans.

    Returns:
        The model's state dict.
    """
    import digits
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    import rankzero.compat.horovod.torch as hvd

    hvd.init()
    torch.manual_seed(digits.SEED)
    model = digits.build_model()
    dataset = TensorDataset(data["train_images"], data["train_labels"])
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3 * hvd.size())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        mean = hvd.allreduce(loss.detach(), name="loss")
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {mean.item():.4f}")
    return model.state_dict()
