"""`DistributedOptimizer` of every kind of optimizer: it steps by the mean gradient, and stays what it was."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankzero import Launcher


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(2, store=tmp_path)


def loss_of(parameters: Any, rank: int) -> Any:
    return sum(((parameter - rank) ** 2 * (index + 1)).sum() for index, parameter in enumerate(parameters))


def kinds() -> dict[str, Callable[[Any], Any]]:
    """Every class of torch.optim but SparseAdam, and such as users write."""
    import torch

    class OfOwn(torch.optim.Optimizer):
        """With a required argument, attributes, and a step without a closure."""

        def __init__(self, params: Any, factor: float) -> None:
            self.factor, self.steps = factor, 0
            super().__init__(params, {"lr": 0.1})

        def zero_grad(self) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

        @torch.no_grad()
        def step(self) -> None:
            self.steps += 1
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad, alpha=group["lr"] * self.factor / self.steps)

    class Lookahead(torch.optim.Optimizer):
        """Around another one, whose groups it shares, without a call of torch's constructor."""

        def __init__(self, inner: Any) -> None:
            self.inner, self.param_groups, self.state, self.defaults = inner, inner.param_groups, inner.state, {}
            self.slow = [one.detach().clone() for group in inner.param_groups for one in group["params"]]

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.inner.zero_grad(set_to_none)

        def step(self, closure: Any = None) -> Any:
            loss = self.inner.step(closure)
            with torch.no_grad():
                for slow, fast in zip(self.slow, self.param_groups[0]["params"], strict=True):
                    slow.add_(fast - slow, alpha=0.5)
                    fast.copy_(slow)
            return loss

    class Sam(torch.optim.Optimizer):
        """Which goes uphill by the gradient that it has, and steps by that of the closure (Foret et al., 2020)."""

        def __init__(self, parameters: Any, lr: float) -> None:
            super().__init__(parameters, {"lr": lr})
            self.inner = torch.optim.SGD(self.param_groups, lr=lr)

        @torch.no_grad()
        def step(self, closure: Any) -> Any:
            uphill = [parameter.grad * 0.05 for parameter in self.param_groups[0]["params"]]
            for parameter, change in zip(self.param_groups[0]["params"], uphill, strict=True):
                parameter.add_(change)
            self.zero_grad()
            with torch.enable_grad():
                loss = closure()
            for parameter, change in zip(self.param_groups[0]["params"], uphill, strict=True):
                parameter.sub_(change)
            self.inner.step()
            return loss

    names = [name for name in vars(torch.optim) if isinstance(getattr(torch.optim, name), type)]
    found = {name: getattr(torch.optim, name) for name in names if name not in ("Optimizer", "SparseAdam")}
    return {
        **{name: lambda parameters, cls=cls: cls(parameters, lr=0.1) for name, cls in found.items()},
        "fused": lambda parameters: torch.optim.Adam(parameters, lr=0.1, fused=True),
        "tensor lr": lambda parameters: torch.optim.SGD(parameters, lr=torch.tensor(0.1), momentum=0.9),
        "of own": lambda parameters: OfOwn(parameters, 0.5),
        "sam": lambda parameters: Sam(parameters, 0.1),
        "lookahead": lambda parameters: Lookahead(torch.optim.SGD(parameters, lr=0.1, momentum=0.9)),
    }


def test_every_optimizer_steps_by_the_mean_gradient(launcher: Launcher) -> None:
    def train() -> Any:
        import torch

        import rankzero.compat.horovod.torch as hvd

        hvd.init()

        def parameters() -> Any:
            return [torch.nn.Parameter(torch.full(shape, 3.0, dtype=torch.float64)) for shape in ((3, 2), (2, 2))]

        for name, make in kinds().items():
            ours, plain = parameters(), parameters()
            optimizer, reference = make(ours), make(plain)
            attributes = dict(vars(optimizer))
            wrapped = hvd.DistributedOptimizer(optimizer, [(str(index), one) for index, one in enumerate(ours)])
            assert isinstance(wrapped, type(reference)), name
            assert {key: vars(wrapped)[key] for key in attributes} == attributes, name
            for _ in range(3):

                def closure(wrapped: Any = wrapped, ours: Any = ours) -> Any:
                    wrapped.zero_grad()
                    loss = loss_of(ours, hvd.rank())
                    loss.backward()
                    return hvd.allreduce(loss.detach())

                def expected(reference: Any = reference, plain: Any = plain) -> Any:
                    reference.zero_grad()
                    loss = (loss_of(plain, 0) + loss_of(plain, 1)) / 2
                    loss.backward()
                    return loss

                if name != "LBFGS":
                    closure()
                    expected()
                if name in ("LBFGS", "sam"):
                    wrapped.step(closure)
                    reference.step(expected)
                else:
                    wrapped.step()
                    reference.step()
            for mine, other in zip(ours, plain, strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9, msg=name)
            assert not torch.equal(ours[0], torch.full_like(ours[0], 3.0)), name
        return True

    assert launcher.run(train)


@pytest.mark.parametrize("when", ["before", "after"])
def test_schedulers_and_hooks_made_before_and_after_wrapping(launcher: Launcher, when: str) -> None:
    def train() -> Any:
        import torch

        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        warnings.simplefilter("error")
        parameter = torch.nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        calls = []

        def around(optimizer: Any) -> Any:
            optimizer.register_step_pre_hook(lambda *_: calls.append(("before", parameter.grad.tolist())))
            optimizer.register_step_post_hook(lambda *_: calls.append(("after", None)))
            return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

        scheduler = around(optimizer) if when == "before" else None
        optimizer = hvd.DistributedOptimizer(optimizer, [("p", parameter)])
        scheduler = scheduler or around(optimizer)
        for step in range(2):
            optimizer.zero_grad()
            (parameter.sum() * (hvd.rank() + 1)).backward()
            optimizer.step()
            scheduler.step()
            if step == 0:
                # torch takes the class for one that it has not seen.
                optimizer.load_state_dict(optimizer.state_dict())
        return calls, parameter.tolist(), optimizer.param_groups[0]["lr"]

    calls, values, lr = launcher.run(train)
    assert calls == [("before", [1.5] * 3), ("after", None)] * 2, "once for each step, with the mean of 1 and 2"
    assert values == [-1.5 - 0.75] * 3
    assert lr == 0.25


def test_parameters_that_come_later(launcher: Launcher) -> None:
    def train() -> Any:
        import gc
        import weakref

        import torch

        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        rank = hvd.rank()
        model = torch.nn.ModuleList([torch.nn.Linear(2, 1, bias=False) for _ in range(3)])
        hvd.broadcast_parameters(model.state_dict())
        thawed, added, stranger = model[1].weight, model[2].weight, torch.nn.Parameter(torch.zeros(2))
        thawed.requires_grad_(False)
        optimizer = torch.optim.SGD([*model[0].parameters(), thawed], lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

        def gradients(*parameters: Any) -> Any:
            optimizer.zero_grad()
            sum((parameter * (rank + 1)).sum() for parameter in parameters).backward()
            optimizer.step()
            return [parameter.grad.unique().tolist() for parameter in parameters]

        first = model[0].weight
        assert gradients(first) == [[1.5]]
        thawed.requires_grad_(True)
        assert gradients(first, thawed) == [[1.5], [1.5]], "frozen when the optimizer was wrapped"
        assert gradients(first, thawed) == [[1.5], [1.5]]
        optimizer.add_param_group({"params": [added]})
        optimizer.add_param_group({"params": [stranger], "lr": 1.0})
        assert gradients(first, added, stranger) == [[1.5], [1.5], [1.5]], "added, with a name and without one"
        assert stranger.tolist() == [-1.5, -1.5]
        first.requires_grad_(False)
        assert gradients(thawed) == [[1.5]]
        assert first.grad is None
        first.requires_grad_(True)

        # Another optimizer for the same parameters, as for the next phase of a fine-tuning.
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
        assert gradients(first, thawed) == [[1.5], [1.5]]
        assert gradients(first, thawed) == [[1.5], [1.5]]
        with pytest.raises(ValueError, match="already"):
            hvd.DistributedOptimizer(optimizer)

        def dropped() -> Any:
            model = torch.nn.Linear(2, 1)
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            return weakref.ref(model.weight)

        parameter = dropped()
        gc.collect()
        assert parameter() is None, "nothing keeps a model that is no longer used"
        return True

    assert launcher.run(train)


def test_state_is_copied_by_its_dict(launcher: Launcher) -> None:
    def train() -> Any:
        import copy
        import pickle

        import torch

        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        model = torch.nn.Linear(2, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state = optimizer.state_dict()
        assert pickle.loads(pickle.dumps(copy.deepcopy(state))).keys() == state.keys()
        for of_object in (copy.deepcopy, copy.copy, pickle.dumps):
            with pytest.raises(TypeError, match="state_dict"):
                of_object(optimizer)
        # Not what the backward pass began, but what was saved.
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.load_state_dict(copy.deepcopy(state))
        optimizer.zero_grad()
        return optimizer.state[model.weight]["step"].item()

    assert launcher.run(train) == 1.0


@pytest.mark.soak
def test_a_compiled_model_and_a_compiled_step(launcher: Launcher) -> None:
    def train() -> Any:
        import torch

        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        found = []
        for backend in ("eager", "aot_eager", "inductor"):
            torch.manual_seed(0)
            model = torch.nn.Linear(4, 1, bias=False)
            before = model.weight.detach().clone()
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
            compiled, step = torch.compile(model, backend=backend), torch.compile(optimizer.step, backend=backend)
            for _ in range(2):
                optimizer.zero_grad()
                compiled(torch.full((1, 4), hvd.rank() + 1.0)).sum().backward()
                step()
            found.append((before - model.weight).detach())
        return found

    for change in launcher.run(train):
        assert change.tolist() == [pytest.approx([3.0] * 4)]
