"""Gradients are the mean over ranks, bit by bit where that can be asked."""

import contextlib
import copy
import functools

import pytest
import torch
import torch.distributed as dist
from models import MODELS, batch, build, far_apart, gradients, joined, loss, same_bits, state
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import stretto
from stretto.testing import run_ranks, spawn_ranks
from stretto.wording import MIB

CAPS = {"one parameter a bucket": 1 / MIB, "1 KB": 1 / 1024, "default": None, "everything in one": 1024.0}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    # eps: a gradient near 0 must not turn an ulp of difference into a step of another sign
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3),
}
STEPS = 5
ULPS = 4

table = functools.partial(pytest.mark.parametrize, ids=str)
one_run = {
    world: pytest.mark.xdist_group(f"exactness {world}") for world in (2, 3)
}  # one worker has all: see outcome()
each_model = table("name", MODELS)
each_cap = table("cap", CAPS)
each_world = table("world", [1, *(pytest.param(n, marks=[pytest.mark.ranks, one_run[n]]) for n in (2, 3))])


# The table: all cases of one world size run in the same processes, and the tests look at what came out.


def attach(model, cap, **options):
    return stretto.attach(model, bucket_cap_mb=CAPS[cap], last_bucket_cap_mb=CAPS[cap], **options)


def train(module, forward, name, optimizer, rank):
    """Gradients of each pass and the state at the end."""
    optimizer = OPTIMIZERS[optimizer](module.parameters())
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(forward, batch(name, rank, step)).backward()
        seen.append(gradients(module))
        optimizer.step()
    return {"gradients": seen, "state": state(module)}


def train_with_torch(name, optimizer, rank, world):
    """torch's DDP with its default buckets, in the same process; in a world of one the bare module."""
    model = build(name, seed=rank)
    return train(model, TorchDDP(model) if world > 1 else model, name, optimizer, rank)


def train_case(name, cap, optimizer, rank, world):
    model = build(name, seed=rank)
    sync = attach(model, cap)
    result = {"ours": train(model, model, name, optimizer, rank)}

    alone = copy.deepcopy(model)  # in eval mode, where BatchNorm does not mix the rows of a batch
    for module, data in ((model, batch(name, rank, STEPS)), (alone, joined(name, world, STEPS))):
        module.eval().zero_grad()
        loss(module, data).backward()
    result |= {"mean": gradients(model), "joined": gradients(alone), "plans": sync.statistics.plans, "plan": sync.plan}
    sync.detach()
    return result


def train_table(rank, world):
    results = {}
    for name in MODELS:
        for optimizer in OPTIMIZERS:
            theirs = train_with_torch(name, optimizer, rank, world)
            for cap in CAPS:
                try:
                    results[name, cap, optimizer] = train_case(name, cap, optimizer, rank, world) | {"torch": theirs}
                except Exception as error:
                    raise RuntimeError(f"model {name}, world {world}, cap {cap!r}, {optimizer}") from error
    return results, [run_mode(mode, face, rank) for mode, face in mode_cases()] if world == 2 else []


@functools.cache
def outcome(world):
    try:
        return [train_table(0, 1)] if world == 1 else spawn_ranks(train_table, world, world)
    except Exception as error:
        return error


def ranks_of(world):
    ranks = outcome(world)
    if isinstance(ranks, Exception):
        raise ranks
    return ranks


def case(world, *key):
    """What each rank says of a case."""
    return [results[key] for results, _ in ranks_of(world)]


@each_world
@each_model
@each_cap
@table("optimizer", OPTIMIZERS)
def test_all_ranks_have_the_same_bits(world, name, cap, optimizer):
    first, *others = case(world, name, cap, optimizer)
    for other in others:
        for step in range(STEPS):
            assert not same_bits(first["ours"]["gradients"][step], other["ours"]["gradients"][step]), f"step {step}"
        assert not same_bits(first["ours"]["state"], other["ours"]["state"])


@each_world
@each_model
@each_cap
@table("optimizer", OPTIMIZERS)
def test_gradients_are_those_of_torch(world, name, cap, optimizer):
    for result in case(world, name, cap, optimizer):
        ours, theirs = result["ours"]["gradients"], result["torch"]["gradients"]
        if world <= 2:
            for step in range(STEPS):
                assert not same_bits(ours[step], theirs[step]), f"step {step}"
        else:  # Gloo's ring sums three in an order that depends on where buckets are cut
            assert not far_apart(ours[0], theirs[0], ulps=ULPS)


@each_world
@each_model
@each_cap
@table("optimizer", OPTIMIZERS)
def test_parameters_after_five_steps_are_those_of_torch(world, name, cap, optimizer):
    for result in case(world, name, cap, optimizer):
        ours, theirs = result["ours"]["state"], result["torch"]["state"]
        # A buffer that differs is right: torch's DDP sends rank 0's when the next forward begins, stretto at once.
        trained = result["plan"].parameters
        ours, theirs = ({p.name: values[p.name] for p in trained} for values in (ours, theirs))
        if world <= 2:
            assert not same_bits(ours, theirs)
        else:
            assert not far_apart(ours, theirs, tolerance=2e-2 if name == "mixed" else 1e-5)


@each_world
@each_model
@each_cap
def test_gradients_are_those_of_one_process_on_the_joined_batch(world, name, cap):
    for optimizer in OPTIMIZERS:
        for result in case(world, name, cap, optimizer):
            assert not far_apart(result["mean"], result["joined"], tolerance=3e-2 if name == "mixed" else 1e-5)


@each_world
@each_cap
def test_table_runs_on_learnt_plans_too(world, cap):
    for optimizer in OPTIMIZERS:
        for name in MODELS:
            plan = case(world, name, cap, optimizer)[0]["plan"]
            if cap == "one parameter a bucket":
                assert len(plan.buckets) == len(plan.parameters)
            if cap == "everything in one":
                assert len(plan.buckets) == (2 if name == "mixed" else 1)
        plans = [result["plans"] for result in case(world, "scrambled", cap, optimizer)]
        assert plans == ([0] if world == 1 else [2] * world)


# The same without processes, against a mean made by hand: divided, then summed in rank order.


def mean_by_hand(tables):
    mean = {name: gradient / len(tables) for name, gradient in tables[0].items()}
    for others in tables[1:]:
        for name in mean:
            mean[name] += others[name] / len(tables)
    return mean


def alone(model, data):
    """This rank's own gradients."""
    twin = copy.deepcopy(model)
    loss(twin, data).backward()
    return gradients(twin)


@table("world", [2, 3])
@each_model
@each_cap
def test_threads_get_the_mean_bit_by_bit(world, name, cap):
    models = [build(name, seed=rank) for rank in range(world)]

    def worker(transport):
        model, seen = models[transport.rank], []
        attach(model, cap, transport=transport)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            data = batch(name, transport.rank, step)
            own = alone(model, data)
            optimizer.zero_grad()
            loss(model, data).backward()
            seen.append((own, gradients(model)))
            optimizer.step()
        return seen

    for step, ranks in enumerate(zip(*run_ranks(worker, world), strict=True)):
        expected = mean_by_hand([own for own, _ in ranks])
        for rank, (_, mean) in enumerate(ranks):
            assert not same_bits(mean, expected), f"rank {rank}, step {step}"


# When gradients are cleared, and when they are synchronised


class Driver:
    """One face on one model, so that the same scenario runs on each."""

    def __init__(self, face, rank):
        self.rank, self.face = rank, face
        self.model = build("mlp", seed=rank)
        if face == "attach":
            self.forward, self.no_sync = self.model, stretto.attach(self.model, bucket_cap_mb=1 / 1024).no_sync
        else:
            wrap = (
                TorchDDP if face == "torch" else functools.partial(stretto.DistributedDataParallel, bucket_cap_mb=1e-3)
            )
            self.forward = wrap(self.model)
            self.no_sync = self.forward.no_sync

    def loss(self, step):
        return loss(self.forward, batch("mlp", self.rank, step))


def cleared_to_none(driver):
    for step in range(4):
        driver.model.zero_grad(set_to_none=True)
        driver.loss(step).backward()
        yield


def cleared_to_zero(driver):
    for step in range(4):
        driver.model.zero_grad(set_to_none=False)
        driver.loss(step).backward()
        yield


def never_cleared(driver):
    for step in range(4):
        driver.loss(step).backward()
        yield


def cleared_by_turns(driver):
    for step in range(6):
        if step % 3:
            driver.model.zero_grad(set_to_none=step % 3 == 1)
        driver.loss(step).backward()
        yield


def cleared_in_part(driver):
    """Buckets in which some gradients lie in their slots already and others are new."""
    for step in range(6):
        for number, parameter in enumerate(driver.model.parameters()):
            if (number + step) % 2:
                parameter.grad = None
        driver.loss(step).backward()
        yield


def no_sync_around_both(driver):
    for step in range(6):
        with driver.no_sync() if step % 3 < 2 else contextlib.nullcontext():
            driver.loss(step).backward()
        yield
        if step == 2:
            driver.model.zero_grad()


def no_sync_around_backward(driver):
    if driver.face == "torch":  # which looks when forward runs
        yield from no_sync_around_both(driver)
        return
    for step in range(6):
        value = driver.loss(step)
        with driver.no_sync() if step % 3 < 2 else contextlib.nullcontext():
            value.backward()
        yield
        if step == 2:
            driver.model.zero_grad()


def forward_inside_no_sync(driver):
    for step in range(3):
        with driver.no_sync() if driver.face == "attach" else contextlib.nullcontext():
            value = driver.loss(step)
        value.backward()
        yield


def wrapper_inside_no_sync(driver):
    """By torch's rule for its wrapper, as diffusion trainers have it: what ran forward inside is not reduced."""
    if driver.face == "attach":
        yield from no_sync_around_both(driver)
        return
    for step in range(6):
        with driver.no_sync() if step % 3 < 2 else contextlib.nullcontext():
            value = driver.loss(step)
        value.backward()
        yield
        if step == 2:
            driver.model.zero_grad()


def one_of_two_forwards_inside_no_sync(driver):
    """A forward outside that no pass has followed is reduced, and with it what ran inside."""
    for step in range(4):
        first = driver.loss(2 * step) if step % 2 else None
        with driver.no_sync() if driver.face != "attach" else contextlib.nullcontext():
            value = driver.loss(2 * step + 1)
        (value + (driver.loss(2 * step) if first is None else first)).backward()
        yield
        with driver.no_sync():
            driver.loss(step).backward()
        yield


def no_sync_left_by_an_exception(driver):
    for step in range(4):
        with contextlib.suppress(ZeroDivisionError), driver.no_sync():
            driver.loss(2 * step).backward()
            raise ZeroDivisionError
        yield
        driver.loss(2 * step + 1).backward()
        yield


MODES = {
    mode.__name__: mode
    for mode in (
        cleared_to_none,
        cleared_to_zero,
        never_cleared,
        cleared_by_turns,
        cleared_in_part,
        no_sync_around_both,
        no_sync_around_backward,
        forward_inside_no_sync,
        wrapper_inside_no_sync,
        one_of_two_forwards_inside_no_sync,
        no_sync_left_by_an_exception,
    )
}


def mode_cases():
    return [(mode, face) for mode in MODES for face in ("torch", "attach", "drop-in")]


def run_mode(mode, face, rank):
    """Gradients of this rank after each pass."""
    driver = Driver(face, rank)
    return [gradients(driver.model) for _ in MODES[mode](driver)]


@pytest.mark.ranks
@one_run[2]
@table("mode", MODES)
@table("face", ["attach", "drop-in"])
def test_mode_gives_the_bits_of_torch(mode, face):
    for rank, (_, modes) in enumerate(ranks_of(2)):
        seen = dict(zip(mode_cases(), modes, strict=True))
        ours, theirs = seen[mode, face], seen[mode, "torch"]
        assert len(ours) == len(theirs) >= 3
        for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert not same_bits(one, other), f"rank {rank}, pass {step}"


def test_no_sync_leaves_each_rank_its_own_sum():
    models = [build("mlp", seed=5) for _ in range(2)]

    def worker(transport):
        model = models[transport.rank]
        sync = stretto.attach(model, transport=transport)
        batches = [batch("mlp", transport.rank, step) for step in range(2)]
        own = [alone(model, data) for data in batches]
        with sync.no_sync():
            loss(model, batches[0]).backward()
        inside = gradients(model)
        loss(model, batches[1]).backward()
        return own, inside, gradients(model)

    ranks = run_ranks(worker, 2)
    sums = []
    for own, inside, _ in ranks:
        assert not same_bits(inside, own[0])
        sums.append({name: own[0][name] + own[1][name] for name in inside})
    for _, _, mean in ranks:
        assert not same_bits(mean, mean_by_hand(sums))


def test_what_only_unsynchronised_passes_reached_is_reduced_too():
    models = [build("scrambled", seed=5) for _ in range(2)]

    def worker(transport):
        model, data = models[transport.rank], batch("scrambled", transport.rank)
        sync = stretto.attach(model, transport=transport, bucket_cap_mb=1 / 1024)
        twin = copy.deepcopy(model)
        for execution in ([0, 1], [4, 2]):
            model.execution = twin.execution = execution
            with sync.no_sync() if execution == [0, 1] else contextlib.nullcontext():
                loss(model, data).backward()
            loss(twin, data).backward()
        return gradients(twin), gradients(model)

    ranks = run_ranks(worker, 2)
    expected = mean_by_hand([{n: g for n, g in own.items() if g is not None} for own, _ in ranks])
    assert len(expected) == 16
    for _, mean in ranks:
        assert not same_bits(mean, expected | {name: None for name in mean if name.startswith("block3")})


def test_no_sync_nests():
    sync = run_ranks(lambda transport: stretto.attach(build("mlp"), transport=transport), 2)[0]
    with sync.no_sync():
        with sync.no_sync():
            assert not sync.synchronize
        assert not sync.synchronize
    assert sync.synchronize


# Where gradients lie


@table("clear", [True, False, None])
@each_model
def test_gradients_are_views_of_one_buffer_a_bucket(name, clear):
    models = [build(name) for _ in range(2)]

    def worker(transport):
        model = models[transport.rank]
        if name == "cnn":
            model.to(memory_format=torch.channels_last)
        sync = attach(model, "1 KB", transport=transport)
        parameters = dict(model.named_parameters())
        places = []
        for step in range(4):
            if clear is not None:
                model.zero_grad(set_to_none=clear)
            loss(model, batch(name, transport.rank, step)).backward()
            assert all(p.grad.stride() == p.stride() and p.grad.dtype == p.dtype for p in parameters.values())
            for bucket in sync.plan.buckets:
                members = [parameters[sync.plan.parameters[index].name].grad for index in bucket.indices]
                storages = {member.untyped_storage().data_ptr() for member in members}
                assert len(storages) == 1, f"the gradients of one bucket lie in {len(storages)} places"
                size = sum(member.nbytes for member in members)
                assert members[0].untyped_storage().nbytes() >= size
                places.append((step, storages.pop()))
                del members  # gradients that somebody keeps would be left to him
            assert len({place for at, place in places if at == step}) == len(sync.plan.buckets) > 0
        # From the second pass on (the first may end with a new plan) buffers stay.
        assert {place for step, place in places if step == 2} == {place for step, place in places if step == 3}
        return True

    assert all(run_ranks(worker, 2))


def test_channels_last_is_kept_and_right():
    models = [build("cnn", seed=3).to(memory_format=torch.channels_last) for _ in range(2)]
    plain = build("cnn", seed=3).eval()

    def worker(transport):
        model = models[transport.rank].eval()
        attach(model, "everything in one", transport=transport)
        for step in range(2):
            model.zero_grad()
            loss(model, batch("cnn", transport.rank, step)).backward()
        weight = model[3].weight
        assert weight.grad.is_contiguous(memory_format=torch.channels_last) and not weight.grad.is_contiguous()
        return gradients(model)

    first, second = run_ranks(worker, 2)
    assert not same_bits(first, second)
    loss(plain, joined("cnn", 2, 1)).backward()
    assert not far_apart(first, gradients(plain), tolerance=1e-5)


@table("dynamic", [False, True])
@table("at", [0, 1, 5])
def test_another_memory_format_is_followed_in_that_very_pass(at, dynamic):
    """A fused optimizer takes gradient and parameter for alike in memory, and asks nobody."""

    def net():
        made = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.Conv2d(4, 3, 1))
        for parameter in made.parameters():
            parameter.data.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
        return made

    def step(model, optimizer, images, number):
        if number == at:
            model.to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        layers = model[:1] if dynamic and number == 2 else model  # from then on nothing is handed out before the end
        (sum(layers(one).square().mean() for one in images) / len(images)).backward()
        for parameter in layers.parameters():
            assert parameter.grad.stride() == parameter.stride()
        optimizer.step()

    def worker(transport):
        model, plain = net(), net()
        sync = attach(model, "1 KB", transport=transport)
        fused, known = (torch.optim.AdamW(one.parameters(), lr=0.1, fused=True) for one in (model, plain))
        images = [torch.linspace(-1, 1 + rank, 72).view(1, 2, 6, 6) for rank in range(2)]
        for number in range(9):
            step(model, fused, [images[transport.rank]], number)
            step(plain, known, images, number)
            sync.check()
        assert sync.statistics.plans <= 3
        both = zip(model.parameters(), plain.parameters(), strict=True)
        return max((mine - theirs).abs().max().item() for mine, theirs in both)

    assert max(run_ranks(worker, 2)) < 1e-4


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
@table("orders", [("ab", "ba"), ("ba", "ab"), ("b", "ab"), ("ab", "b")])
@table("reduce", ["mean", "sum"])
@table("kept", [False, True])
@table("added", [False, True])
def test_other_strides_that_some_ranks_see_and_others_do_not_count_once(orders, reduce, kept, added):
    """Of a matrix they are seen where gradients come in another order; where not, its bucket brings it all the same."""
    scale = 1.0 if reduce == "sum" else 0.5

    def worker(transport):
        model = torch.nn.ParameterDict({name: torch.ones(2, 2) for name in "ab"})
        attach(model, "everything in one", transport=transport, reduce=reduce)
        found = []
        for number in range(4):
            if number == 1:
                model["a"].data = model["a"].data.t().contiguous().t()
                if added:
                    model["c"] = torch.ones(2)
            if not kept:
                model.zero_grad()
            order = orders[transport.rank] if number == 1 else "ab"
            sum((model[name] * (1 + transport.rank)).sum() for name in order).backward()
            found.append(model["a"].grad.aminmax())
        return torch.tensor(found)

    news = [scale * sum(1 + rank for rank in range(2) if number != 1 or "a" in orders[rank]) for number in range(4)]
    wanted = [sum(news[: number + 1]) if kept else new for number, new in enumerate(news)]
    for found in run_ranks(worker, 2):
        assert torch.equal(found, torch.tensor(wanted)[:, None].expand(4, 2))


def under_other_names(model: torch.nn.ParameterDict, how: str) -> None:
    first, second = model["a"], model["b"]
    if how == "swapped":
        model["a"], model["b"] = second, first
    else:
        del model["a"]
        model["d"] = first
    if how == "taken over":
        del model["b"]
        model["a"] = second
    elif how == "taken by a new one":
        model["a"] = torch.ones(2, 2)


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
@table("orders", [("ab", "ba"), ("ba", "ab"), ("b", "ab"), ("ab", "b"), ("ba", "ba")])
@table("reduce", ["mean", "sum"])
@table("kept", [False, True])
@table("how", ["renamed", "swapped", "taken over", "taken by a new one"])
def test_other_strides_under_another_name_that_some_ranks_see_count_once(orders, reduce, kept, how):
    """The rank that has not seen them has sent the gradient in the old bucket, by the old name."""
    scale = 1.0 if reduce == "sum" else 0.5

    def worker(transport):
        model = torch.nn.ParameterDict({name: torch.ones(2, 2) for name in "ab"})
        both = {name: model[name] for name in "ab"}
        attach(model, "everything in one", transport=transport, reduce=reduce)
        found = []
        for number in range(4):
            if number == 1:
                both["a"].data = both["a"].data.t().contiguous().t()
                under_other_names(model, how)
            if not kept:
                model.zero_grad()
            order = orders[transport.rank] if number == 1 else "ab"
            sum((both[name] * (1 + transport.rank)).sum() for name in order).backward()
            found.append([one.grad.aminmax() for one in both.values()])
        return torch.tensor(found)

    passes = range(4)
    news = {n: [scale * sum(1 + r for r in range(2) if i != 1 or n in orders[r]) for i in passes] for n in "ab"}
    wanted = [[[sum(new[: i + 1]) if kept else new[i]] * 2 for new in news.values()] for i in passes]
    for found in run_ranks(worker, 2):
        assert torch.equal(found, torch.tensor(wanted))


def test_attaching_levels_the_ranks():
    models = [build("cnn", seed=rank) for rank in range(3)]
    with torch.no_grad():
        for rank, model in enumerate(models):
            model[1].running_mean.fill_(rank)
    first = state(models[0])
    run_ranks(lambda transport: stretto.attach(models[transport.rank], transport=transport), 3)
    for model in models:
        assert not same_bits(state(model), first)


def test_buffers_follow_rank_0_when_backward_ends():
    models = [build("cnn") for _ in range(2)]
    bare = copy.deepcopy(models[0])

    def worker(transport):
        model = models[transport.rank]
        stretto.attach(model, transport=transport)
        value = loss(model, batch("cnn", transport.rank))
        own = state(model)
        value.backward()
        return own

    before = run_ranks(worker, 2)
    assert "1.running_mean" in same_bits(*before), "forward alone must not communicate"
    loss(bare, batch("cnn", 0))
    buffers = {name for name, _ in bare.named_buffers()}
    assert len(buffers) == 6
    for model in models:
        assert not buffers.intersection(same_bits(state(model), state(bare)))


# A world of one


@pytest.fixture(params=["no process group", "a group of one"])
def world_of_one(request):
    if request.param == "a group of one":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if request.param == "a group of one":
        dist.destroy_process_group()


@table("face", ["attach", "drop-in"])
def test_a_world_of_one_costs_nothing(world_of_one, face):
    model = build("mlp")
    bare = copy.deepcopy(model)
    if face == "attach":
        sync, forward = stretto.attach(model), model
    else:
        forward = stretto.DistributedDataParallel(model)
        sync = forward.synchronizer
    for step in range(3):
        for run, target in ((forward, model), (bare, bare)):
            target.zero_grad()
            with sync.no_sync():
                loss(run, batch("mlp", 0, step)).backward()
            loss(run, batch("mlp", 0, step + 1)).backward()
        assert not same_bits(gradients(model), gradients(bare))
    assert not any(p._post_accumulate_grad_hooks or p._backward_hooks for p in model.parameters())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert (sync.rank, sync.world_size, sync.statistics) == (0, 1, stretto.Statistics())
    assert str(sync.plan) and sync.describe()
    sync.detach()
