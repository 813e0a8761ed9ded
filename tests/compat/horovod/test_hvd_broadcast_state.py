"""`broadcast_parameters` and `broadcast_optimizer_state`: afterwards every rank has what the root has."""

from pathlib import Path
from typing import Any

import pytest

from rankzero import Launcher, WorkerFailedError


def optimizers() -> dict[str, Any]:
    """Every class of torch.optim, with and without state, and such as users write."""
    import torch

    class Nested(torch.optim.SGD):
        """Whose state has lists, None and numbers."""

        def step(self, closure: Any = None) -> Any:
            for parameter in self.param_groups[0]["params"]:
                past = self.state[parameter].setdefault("past", [])
                past.append((parameter.grad.clone(), None, {"norm": parameter.grad.norm().item()}))
                self.state[parameter]["empty"] = torch.empty(0, 2)
            return super().step(closure)

    class Flat(torch.optim.Optimizer):
        """Whose state_dict is not of torch's form."""

        def __init__(self, parameters: Any, lr: float) -> None:
            super().__init__(parameters, {"lr": lr})
            self.count = torch.tensor(0)

        def step(self, closure: Any = None) -> None:
            self.count += 1

        def state_dict(self) -> Any:
            return {"count": self.count, "lr": self.param_groups[0]["lr"]}

        def load_state_dict(self, state: Any) -> None:
            self.count, self.param_groups[0]["lr"] = state["count"], state["lr"]

    names = [name for name in vars(torch.optim) if isinstance(getattr(torch.optim, name), type)]
    found = {name: getattr(torch.optim, name) for name in names if name != "Optimizer"}
    return {
        **{name: lambda parameters, lr, cls=cls: cls(parameters, lr=lr) for name, cls in found.items()},
        "momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        "tensor lr": lambda parameters, lr: torch.optim.AdamW(parameters, lr=torch.tensor(lr), amsgrad=True),
        "nested": Nested,
        "flat": Flat,
    }


def test_the_state_of_every_optimizer(tmp_path: Path) -> None:
    def train() -> Any:
        import torch

        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        rank = hvd.rank()
        # Only some ranks of all, and the last of them has it.
        some = hvd.add_process_set([1, 2])
        for name, make in optimizers().items() if rank else ():
            parameters = [torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.ones(2, 2))]
            optimizer = make(parameters, 0.1 * rank)

            def closure(parameters: Any = parameters) -> Any:
                for parameter in parameters:
                    parameter.grad = None
                loss = sum(parameter.pow(2).sum() for parameter in parameters)
                loss.backward()
                return loss

            def step(
                optimizer: Any = optimizer, name: str = name, closure: Any = closure, parameters: Any = parameters
            ) -> None:
                if name == "LBFGS":
                    optimizer.step(closure)
                    return
                closure()
                for parameter in parameters if name == "SparseAdam" else ():
                    parameter.grad = parameter.grad.to_sparse()
                optimizer.step()

            for _ in range(2 if rank == 2 else (name == "tensor lr")):
                step()
            hvd.broadcast_optimizer_state(optimizer, root_rank=2, process_set=some)
            states = hvd.allgather_object(optimizer.state_dict(), process_set=some)
            torch.testing.assert_close(states[0], states[1], rtol=0, atol=0, msg=name)
            assert states[0].keys() == states[1].keys()
            if name not in ("SGD", "flat"):
                assert states[0]["state"], name
            if name == "nested":
                past = states[0]["state"][0]["past"]
                assert len(past) == 2
                assert past[1][1:] == (None, {"norm": past[1][0].norm().item()})
            step()
        return hvd.allgather_object(hvd.rank())

    assert Launcher(3, store=tmp_path).run(train) == [0, 1, 2]


def test_parameters_of_every_kind(tmp_path: Path) -> None:
    def train() -> Any:
        import torch

        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        rank = hvd.rank()
        model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.LSTM(2, 2))
        if rank:
            model = model.to(memory_format=torch.channels_last)
        model[0].register_buffer("nothing", torch.empty(0, 3))
        model[0].register_buffer("mask", torch.tensor([rank == 1, False]))
        model[0].register_buffer("strided", torch.full((4, 4), float(rank))[::2, ::2])
        model[0].register_buffer("one", torch.full((4,), float(rank))[::2][:1])
        model[0].register_buffer("short", torch.full((4,), float(rank), dtype=torch.bfloat16))
        model[1].num_batches_tracked.fill_(7 * rank)
        for params in (model.state_dict(), model.named_parameters(), list(model.parameters()), model.parameters()):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(rank)
            hvd.broadcast_parameters(params, root_rank=1)
            assert all(bool((parameter == 1).all()) for parameter in model.parameters())
        assert model[1].num_batches_tracked.item() == 7
        assert model[0].mask.tolist() == [True, False]
        assert model[0].strided.tolist() == [[1.0, 1.0], [1.0, 1.0]]
        assert model[0].one.tolist() == [1.0]
        assert model[0].short.tolist() == [1.0] * 4

        for wrong, reason in [
            ({"a": torch.ones(2), "extra_state": {"steps": 1}}, "'extra_state' is a dict"),
            ({"a": torch.ones(2, device="meta")}, "'a' is on the meta device"),
            ("model", "invalid params of type: str"),
        ]:
            with pytest.raises(ValueError, match=reason):
                hvd.broadcast_parameters(wrong)
        with pytest.raises(ValueError, match=r"root_rank is 7; the ranks are \[0, 1\]"):
            hvd.broadcast_parameters(model.state_dict(), root_rank=7)
        with pytest.raises(hvd.MismatchError, match=r"parameter.a.*rank 0.*\[2\].*rank 1.*\[3\]"):
            hvd.broadcast_parameters({"a": torch.ones(2 + rank)})
        return True

    assert Launcher(2, store=tmp_path).run(train)


def test_a_rank_with_a_parameter_more_is_an_error(tmp_path: Path) -> None:
    def train() -> None:
        import torch

        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        model = torch.nn.Linear(2, 1, bias=hvd.rank() == 1)
        hvd.broadcast_parameters(model.state_dict())

    with pytest.raises(WorkerFailedError, match=r"parameter.bias' was issued by rank \[1\], but rank \[0\] has ended"):
        Launcher(2, store=tmp_path).run(train)
