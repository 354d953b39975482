"""Every member of torch's DistributedDataParallel is there or refused by name, and behaves as docs/drop-in.md says."""

import ast
import contextlib
import copy
import inspect
import io
import logging.handlers
import pathlib
import pickle
import re
import tempfile
import textwrap
import threading
import types
import warnings
import weakref

import numpy
import pytest
import torch
import torch.distributed as dist
from models import batch, build, loss, same_bits, state
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHookLocation, _find_tensors, _MixedPrecision

from stretto import AlreadyAttachedError, DistributedDataParallel, PeerError, SetupError, UnsupportedError, attach
from stretto.ddp_compat import REFUSED
from stretto.ddp_faces import REFUSED_OF_REDUCER
from stretto.testing import spawn_ranks
from stretto.trace import read_trace

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "drop-in.md"


def table():
    """Member or argument -> verdict, over all tables of the page."""
    found = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 3:
            found |= {(name, len(found)): cells[1] for name in re.findall(r"`(\w+)`", cells[0])}
    return {name: verdict for (name, _), verdict in found.items()}


def members():
    """What torch's class has beyond a Module: methods, properties, and attributes that any of its methods sets."""
    own = {name for name in vars(TorchDDP) if name not in vars(torch.nn.Module)} | {"forward", "train"}
    own |= {name for name in vars(Joinable) if not name.startswith("__")}
    tree = ast.parse(textwrap.dedent(inspect.getsource(TorchDDP)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            own.add(node.attr)
    made_by_python = {"__annotations__", "__doc__", "__module__", "__slots__", "__abstractmethods__", "_abc_impl"}
    return own - made_by_python - {"_static_graph_delay_allreduce_enqueued", "__parameters__", "__orig_bases__"}


MEMBERS = sorted(members())
ONLY_IN_USE = {"buffer_hook", "_authoritative_rank", "_divide_by_initial_world_size"}
"""Set by torch's class when it is asked for something, not before."""
ONLY_INSIDE = {"_ddp_sink_clone", "_delay_grad_buffer", "_delay_grad_views", "_accum_grad_hooks"}
"""State of torch's own mechanisms, which nothing outside of its class reads."""


def check_member(name, wrapped):
    """It is there, or refused by name."""
    if table()[name] == "refused":
        if name in REFUSED:
            with pytest.raises(UnsupportedError, match=f"DistributedDataParallel.{name} is not supported by"):
                getattr(wrapped, name)()
        else:
            assert not hasattr(wrapped, name)
    elif name not in ONLY_IN_USE | ONLY_INSIDE:
        if wrapped.process_group is not None or name == "module":
            getattr(wrapped, name)
        else:  # a property may want a group, so it is not asked
            inspect.getattr_static(wrapped, name)
        theirs = inspect.getattr_static(TorchDDP, name, None)
        ours = inspect.getattr_static(type(wrapped), name, None)
        assert not (inspect.isfunction(theirs) and not inspect.isfunction(ours)), name


@pytest.fixture(scope="module")
def wrapped():
    """Alone, without a group."""
    return DistributedDataParallel(torch.nn.Linear(2, 1))


class TestSurface:
    @pytest.mark.parametrize("name", MEMBERS)
    def test_each_member_of_torch_is_in_the_table(self, name):
        assert name in table(), f"{name}: write it, or give it a row in {PAGE.name}"

    @pytest.mark.parametrize("name", MEMBERS)
    def test_a_member_is_there_unless_it_is_refused(self, name, wrapped):
        check_member(name, wrapped)

    def test_methods_take_the_arguments_of_torchs(self):
        for name in MEMBERS:
            theirs, ours = (inspect.getattr_static(one, name, None) for one in (TorchDDP, DistributedDataParallel))
            if inspect.isfunction(theirs) and name not in REFUSED and theirs is not ours and name != "__init__":
                assert [*inspect.signature(theirs).parameters] == [*inspect.signature(ours).parameters], name

    def test_the_constructor_begins_with_torchs_arguments_in_its_order(self):
        theirs = list(inspect.signature(TorchDDP.__init__).parameters.values())
        ours = list(inspect.signature(DistributedDataParallel.__init__).parameters.values())
        assert [p.name for p in ours[: len(theirs)]] == [p.name for p in theirs]
        assert [p.default for p in ours[: len(theirs)]] == [p.default for p in theirs]
        assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(theirs) : -1]) and ours[-1].name == "unknown"
        assert {p.name for p in theirs[1:]} <= table().keys()

    def test_arguments_of_apex_are_answered_with_what_to_write(self):
        with pytest.raises(TypeError) as caught:
            DistributedDataParallel(torch.nn.Linear(1, 1), message_size=10_000_000, delay_allreduce=True)
        assert str(caught.value) == (
            "DistributedDataParallel: there is no argument message_size=. Write bucket_cap_mb=, in MiB, not in "
            "elements.\n"
            "DistributedDataParallel: there is no argument delay_allreduce=. Write delay=."
        )

    def test_a_misspelt_argument_is_answered_with_the_one_that_there_is(self):
        """``device_id=`` was answered as by ``attach``: to leave out what the class has as ``device_ids=``."""
        with pytest.raises(UnsupportedError) as caught:
            DistributedDataParallel(torch.nn.Linear(1, 1), device_id=[0], device_meshs=None)
        assert str(caught.value) == (
            "DistributedDataParallel: there is no argument device_id=. Use one of: device_ids.\n"
            "DistributedDataParallel: there is no argument device_meshs=. Use one of: device_mesh."
        )

    def test_beside_is_answered_with_where_there_is_one(self):
        with pytest.raises(UnsupportedError) as caught:
            DistributedDataParallel(torch.nn.Linear(1, 1), beside=[])
        assert str(caught.value) == (
            "DistributedDataParallel: there is no argument beside=. Leave it out where the models are on one process "
            "group; else attach the later one by stretto.attach(model, beside=[wrapper.synchronizer])."
        )

    def test_options_of_attach_are_keywords_of_the_drop_in(self):
        ours = inspect.signature(DistributedDataParallel.__init__).parameters
        elsewhere = {"module", "transport", "beside", "unknown"}
        assert set(inspect.signature(attach).parameters) - elsewhere <= set(ours)
        (listed,) = re.findall(r"^Keyword arguments of stretto's own: (.*?), as in", PAGE.read_text(), re.DOTALL | re.M)
        assert re.findall(r"`(\w+)`", listed) == [p.name for p in ours.values() if p.kind is p.KEYWORD_ONLY]

    def test_the_reducer_has_each_method_of_torchs_reducer_or_refuses_it(self, wrapped):
        for name in dir(dist.Reducer):
            if name.startswith("__") or "pybind11" in name:
                continue
            verdict = table()[name]
            if verdict == "refused" or name in REFUSED_OF_REDUCER:
                assert not hasattr(wrapped.reducer, name)
                with pytest.raises(UnsupportedError, match=name):
                    getattr(wrapped.reducer, name)
            else:
                assert callable(getattr(wrapped.reducer, name))

    def test_a_name_that_torch_does_not_have_is_an_attribute_error(self, wrapped):
        with pytest.raises(AttributeError):
            _ = wrapped.reducer.surely_not


class TestAlone:
    """In a world of one: what needs no other rank."""

    def test_it_is_what_frameworks_test_for(self, wrapped):
        assert isinstance(wrapped, TorchDDP) and isinstance(wrapped, Joinable)

    def test_state_dict_has_the_prefix(self, wrapped):
        assert [*wrapped.state_dict()] == ["module.weight", "module.bias"]

    def test_no_flag_changes_anything(self):
        flags = dict.fromkeys(
            ("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "batched_grad_copy"), True
        )
        model = DistributedDataParallel(torch.nn.Linear(2, 1), **flags, skip_all_reduce_unused_params=True)
        assert all(getattr(model, name) for name in flags)
        model(torch.ones(1, 2)).sum().backward()
        assert torch.equal(model.module.weight.grad, torch.ones(1, 2))

    def test_delayed_parameters_come_in_pairs_of_arguments(self):
        model = torch.nn.Linear(1, 1)
        with pytest.raises(ValueError, match="need to be set at the same time"):
            DistributedDataParallel(model, delay_all_reduce_named_params=[("weight", model.weight)])

    def test_buckets_of_a_list_are_at_most_its_largest(self):
        model = DistributedDataParallel(torch.nn.Linear(1, 1), bucket_cap_mb_list=[1, 2])
        assert model.bucket_bytes_cap == 2 * 2**20 and model.bucket_bytes_cap_list == [2**20, 2 * 2**20]

    def test_a_size_of_buckets_is_a_number(self):
        """torch multiplies the text, and fails at a number of two million digits."""
        with pytest.raises(SetupError) as caught:
            DistributedDataParallel(torch.nn.Linear(1, 1), bucket_cap_mb="25")
        assert str(caught.value) == "bucket_cap_mb='25' must be a positive number, or None"

    def test_deprecated_arguments_warn_once_each(self):
        with pytest.warns(FutureWarning, match="broadcast_buffers"):
            DistributedDataParallel(torch.nn.Linear(1, 1), broadcast_buffers=False)
        with pytest.warns(FutureWarning, match="check_reduction"):
            DistributedDataParallel(torch.nn.Linear(1, 1), check_reduction=True)

    def test_static_graph_may_be_set_at_any_time_and_once(self):
        model = DistributedDataParallel(torch.nn.Linear(1, 1))
        model(torch.ones(1, 1)).sum().backward()
        model._set_static_graph()
        assert model.static_graph
        with pytest.warns(UserWarning, match="You've set static_graph to be True, no need to set it again."):
            model._set_static_graph()

    def test_sample_rates_are_checked_and_the_error_is_kept(self, wrapped):
        with pytest.raises(ValueError, match="equal or greater than 1"):
            wrapped._set_ddp_runtime_logging_sample_rate(0)
        said = wrapped._get_ddp_logging_data()
        assert said["has_error"] == 1 and "equal or greater than 1" in said["error"]

    def test_ignored_names_that_do_not_exist_are_no_error(self):
        model = torch.nn.Linear(1, 1)
        TorchDDP._set_params_and_buffers_to_ignore_for_model(model, ["weight", "elsewhere.weight"])
        model = DistributedDataParallel(model)
        assert [spec.name for spec in model.synchronizer.plan.parameters] == ["bias"]

    def test_it_can_be_copied_and_pickled(self):
        model = DistributedDataParallel(torch.nn.Linear(2, 1), reduce_dtype=torch.float64)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert not same_bits(state(model), state(other))
            other(torch.ones(1, 2)).sum().backward()
            assert other.module.weight.grad is not None and model.module.weight.grad is None

    def test_nothing_keeps_it_alive(self):
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        gone = weakref.ref(model)
        del model
        import gc

        gc.collect()
        assert gone() is None

    @pytest.mark.parametrize("low", [{}, {"mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16)}])
    def test_of_two_threads_in_forward_neither_leaves_itself_to_the_compiler(self, low):
        """The second, which ended last, put the first one's wrapper back: it was kept alive, and compiled around."""

        class Stops(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = torch.nn.Linear(1, 1)
                self.begun, self.may_end = threading.Event(), threading.Event()

            def forward(self, tensor):
                self.begun.set()
                assert self.may_end.wait(10)
                return self.inner(tensor)

        modules = [Stops(), Stops()]
        threads = [
            threading.Thread(target=DistributedDataParallel(module, **low), args=[torch.ones(1)]) for module in modules
        ]
        for thread, module in zip(threads, modules, strict=True):
            thread.start()
            assert module.begun.wait(10)
        for thread, module in zip(threads, modules, strict=True):
            module.may_end.set()
            thread.join(10)
        assert TorchDDP._get_active_ddp_module() is None

    def test_of_two_one_in_the_other_each_is_there_for_the_compiler(self):
        inner = DistributedDataParallel(torch.nn.Linear(1, 1))
        outer = torch.nn.Sequential(inner, torch.nn.Linear(1, 1))
        TorchDDP._set_params_and_buffers_to_ignore_for_model(outer, [name for name, _ in outer[:1].named_parameters()])
        outer = DistributedDataParallel(outer)
        seen = []
        for layer in (inner.module, outer.module[1]):
            layer.register_forward_hook(lambda *_: seen.append(TorchDDP._get_active_ddp_module()))
        outer(torch.ones(1, 1))
        assert seen == [inner, outer] and TorchDDP._get_active_ddp_module() is None


def lightning_and_accelerate(rank):
    """The calls that these make around manual optimization and gradient accumulation."""
    model = DistributedDataParallel(build("mlp"))
    with model.no_sync():
        loss(model, batch("mlp", rank)).backward()
    output = loss(model, batch("mlp", rank, 1))
    model.require_backward_grad_sync = True
    model.require_forward_param_sync = True
    assert model.reducer._rebuild_buckets() is False
    model.reducer.prepare_for_backward(list(_find_tensors(output)))
    model.reducer._delay_all_reduce()
    output.backward()
    assert not model._get_ddp_logging_data().get("can_set_static_graph")
    return [p.grad.clone() for p in model.parameters()]


def pickled_and_loaded(rank):
    model = DistributedDataParallel(build("cnn", seed=rank))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    loss(loaded, batch("cnn", rank)).backward()
    other = DistributedDataParallel(build("mlp"), process_group=dist.new_group([0, 1]))
    try:
        pickle.dumps(other)
    except RuntimeError as error:
        return [p.grad.clone() for p in loaded.parameters()], str(error)


def uneven(rank, divide, with_hook):
    """Ranks with 2 and 5 batches; the gradients after each, and the model at the end."""
    model = DistributedDataParallel(build("cnn"), bucket_cap_mb=0.002)
    if with_hook:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        model.register_comm_hook(None, allreduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    gradients = []
    with model.join(divide_by_initial_world_size=divide):
        for step in range(2 + 3 * rank):
            optimizer.zero_grad()
            loss(model, batch("cnn", rank, step)).backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
            optimizer.step()
    optimizer.zero_grad()
    loss(model, batch("cnn", rank, 9)).backward()  # and on, together
    return gradients, state(model), [p.grad.clone() for p in model.parameters()]


def inside_and_outside_behind_join(rank):
    """The gradient of a forward inside ``no_sync``, where one rank has had fewer batches."""
    ddp, x, gradient = one_weight(rank)
    with ddp.join(divide_by_initial_world_size=False):
        for _ in range(1 + rank):
            ddp(x).sum().backward()
    ddp.zero_grad()
    with ddp.no_sync():
        output = ddp(x)
    return gradient(output)


def logged_with_sparse_gradients(rank):
    layers = torch.nn.Embedding(3, 2, sparse=True), torch.nn.Linear(2, 1, dtype=torch.float64)
    said = DistributedDataParallel(torch.nn.Sequential(*layers))._get_ddp_logging_data()
    return [said[key] for key in ("num_parameter_tensors", "total_parameter_size_bytes", "dtypes")]


def accumulating_unevenly(rank):
    """Micro-batches under no_sync, and a word only where it is synchronised."""
    model = DistributedDataParallel(build("mlp"))
    with Join([model]):
        for step in range(4 + 4 * rank):
            with model.no_sync() if step % 2 == 0 else contextlib.nullcontext():
                loss(model, batch("mlp", rank, step)).backward()
    return state(model)


def early_end(rank):
    model = DistributedDataParallel(build("mlp"))
    done = 0
    try:
        with model.join(throw_on_early_termination=True):
            for step in range(2 + rank):
                loss(model, batch("mlp", rank, step)).backward()
                done += 1
    except RuntimeError as error:
        return done, str(error)


def another_group(rank):
    """From both ranks to each alone, and back."""
    model = DistributedDataParallel(build("mlp"))
    alone = [dist.new_group([0]), dist.new_group([1])]
    loss(model, batch("mlp", rank)).backward()
    model.zero_grad()
    model._update_process_group(alone[rank])
    loss(model, batch("mlp", rank)).backward()
    local = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model._update_process_group(dist.group.WORLD)
    loss(model, batch("mlp", rank)).backward()
    return local, [p.grad.clone() for p in model.parameters()]


def buffer_hooks(rank):
    found = []
    for where in _BufferCommHookLocation:
        for with_futures in (False, True):
            model = torch.nn.Linear(1, 1)
            model.register_buffer("seen", torch.tensor([1.0 + rank]))
            model = DistributedDataParallel(model, init_sync=False)

            def total(model, buffers, with_futures=with_futures):
                futures = [
                    dist.all_reduce(b, group=model.process_group, async_op=True).get_future() for b in buffers.values()
                ]
                return futures if with_futures else torch.futures.wait_all(futures) and None

            model._register_buffer_comm_hook(model, total, where)
            output = model(torch.ones(1, 1))
            output.sum().backward()
            with torch.no_grad():
                model(torch.ones(1, 1))
            found.append(model.module.seen.item())
    return found


def buffers_off(rank):
    found = []
    for off in (False, 0, numpy.bool_(False)):
        model = torch.nn.Linear(1, 1)
        model.register_buffer("seen", torch.tensor([1.0 + rank]))
        with pytest.warns(FutureWarning, match="broadcast_buffers"):
            model = DistributedDataParallel(model, broadcast_buffers=off)
        found.append(model.module.seen.item())
        model(torch.ones(1, 1)).sum().backward()
        found.append(model.module.seen.item())
        model.forward_sync_buffers = True
        model(torch.ones(1, 1)).sum().backward()
        found.append(model.module.seen.item())
    return found


def names_with_brackets(rank):
    """torch leaves alone what has a name of the list, not what a pattern of that name would match."""
    module = torch.nn.ParameterDict({name: torch.tensor(1.0 + rank) for name in ("a[0]", "a0")})
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["a[0]"])
    DistributedDataParallel(module)
    return [module["a[0]"].item(), module["a0"].item()]


def attached_anew_amid_accumulation(rank, reduce):
    """What only a backward before has reached, and what it has reached as well, since ``.grad`` was set by hand."""
    layers = {name: torch.nn.Linear(1, 1, bias=False) for name in ("only", "both", "late")}
    layers["rows"] = torch.nn.Embedding(1, 1, sparse=True)
    layers["late"].requires_grad_(False)
    module, found = torch.nn.ModuleDict(layers), []
    module.forward = lambda names, x: sum(module[one](x.long() if one == "rows" else x + 1 + rank) for one in names)
    model = DistributedDataParallel(module, reduce=reduce)
    for anew in (lambda: model._update_process_group(dist.new_group([0, 1])), lambda: None):
        for name in ("only", "both"):
            module[name].weight.grad = torch.full((1, 1), 8.0)
        module["late"].requires_grad_(True)
        with model.no_sync():
            model(["only", "both", "late", "rows"], torch.zeros(1, 1)).sum().backward()
        anew()
        with model.join(divide_by_initial_world_size=False):
            model(["both"], torch.zeros(1, 1)).sum().backward()
        found.append([one.grad.to_dense().item() for one in module.parameters()])
        model.zero_grad()
    return found


def buffers_set_later(rank):
    """For each way to wrap, and then to switch: what is said of the next backward, and what it does."""
    found = []
    warnings.simplefilter("ignore", FutureWarning)
    kinds = ({}, {"buffers": "none"}, {"forward_sync_buffers": False, "buffers": "mean"}, {"broadcast_buffers": False})
    for asked in kinds:
        for name in (None, "forward_sync_buffers", "broadcast_buffers"):
            model = torch.nn.Linear(1, 1)
            model.register_buffer("seen", torch.tensor([1.0]))
            model = DistributedDataParallel(model, **asked)
            if name is not None:
                setattr(model, name, not getattr(model, name))
            model.module.seen += rank
            said = model.will_sync_module_buffers()
            model(torch.ones(1, 1)).sum().backward()
            found.append((said, model.module.seen.item()))
    model._register_buffer_comm_hook(None, lambda state, buffers: None)
    model.broadcast_buffers = True
    return found, model.synchronizer.buffers, model.will_sync_module_buffers()


def asked_of_the_handle_before(rank):
    """It is attached anew where torch's ``Join`` or another group asks for it: what a program has set stays set."""
    model, seen = torch.nn.Linear(1, 1, bias=False), []
    model.register_buffer("seen", torch.tensor([1.0 + rank]))
    model = DistributedDataParallel(model, weighted=True)
    sync = model.synchronizer
    sync.weight, sync.buffers = rank + 1.0, "none"
    sync.observe(types.SimpleNamespace(pass_settled=seen.append))
    with model.no_sync():
        model._update_process_group(dist.new_group([0, 1]))
        model(torch.full((1, 1), rank + 1.0)).sum().backward()
        local = model.module.weight.grad.item()
    model.zero_grad()
    model(torch.full((1, 1), rank + 1.0)).sum().backward()
    assert model.synchronizer is sync  # whoever has kept it goes on with it
    return local, model.module.weight.grad.item(), sync.buffers, seen


def told_while_alone(rank):
    """What observers have seen with the other rank again, and whether this one tells of a weight never set."""
    model, seen, ended = DistributedDataParallel(torch.nn.Linear(1, 1), weighted=True), [], []
    early, late, gone = (types.SimpleNamespace(pass_settled=one.append) for one in (seen, seen, ended))
    for one in (early, gone):
        model.synchronizer.observe(one)
    groups = [dist.new_group([0]), dist.new_group([1])]
    model._update_process_group(groups[rank])
    model.synchronizer.observe(late)
    model.synchronizer.stop_observing(gone)
    model._update_process_group(dist.group.WORLD)
    told = logging.handlers.BufferingHandler(100)
    logging.getLogger("stretto").addHandler(told)
    model(torch.ones(1, 1)).sum().backward()
    logging.getLogger("stretto").removeHandler(told)
    return seen, ended, any("weight" in record.getMessage() for record in told.buffer)


def set_on_the_handle_before(rank):
    """A comm hook and the rate of recording, given to the handle itself and not to the wrapper."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    model, calls = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False)), []

    def hook(group, bucket):
        calls.append(bucket.index())
        return allreduce_hook(group, bucket)

    model.synchronizer.register_comm_hook(dist.group.WORLD, hook)
    model._set_ddp_runtime_logging_sample_rate(7)
    model._update_process_group(dist.new_group([0, 1]))
    with model.join(divide_by_initial_world_size=False):
        model(torch.full((1, 1), rank + 1.0)).sum().backward()
    return calls, model.module.weight.grad.item(), model.synchronizer.sampler.every


def wrapped_again_in_vain(rank):
    """An exception says that the earlier wrapper has ended."""
    DistributedDataParallel(module := torch.nn.Linear(1, 1))
    try:
        DistributedDataParallel(module, reduce="median")
    except UnsupportedError as error:
        return str(error)


def traced_around_join(rank):
    """Which attaches anew: what is said, and how many passes are in the trace inside of it, and in the one around."""
    model, told = DistributedDataParallel(build("mlp")), logging.handlers.BufferingHandler(100)
    logging.getLogger("stretto").addHandler(told)
    with tempfile.TemporaryDirectory() as folder:
        inside, around = f"{folder}/inside", f"{folder}/around"
        with contextlib.ExitStack() as entered:
            entered.enter_context(model.synchronizer.trace(around))
            entered.enter_context(model.join(divide_by_initial_world_size=False))
            entered.enter_context(model.synchronizer.trace(inside))  # of the new handle
            for step in range(2):
                loss(model, batch("mlp", rank, step)).backward()
        logging.getLogger("stretto").removeHandler(told)
        passes = [len(read_trace(one, tell=str)[0].passes) for one in (inside, around)]
        return passes, [record.getMessage().replace(folder, "") for record in told.buffer if record.levelno > 20]


def copied_from_several_groups(rank):
    model = DistributedDataParallel(torch.nn.Linear(1, 1), process_groups=[dist.group.WORLD, dist.new_group([0, 1])])
    copied = copy.deepcopy(model)
    copied(torch.full((1, 1), float(rank))).sum().backward()
    return copied.module.weight.grad.item(), model.module.weight.grad


class Watching:
    def gradient_ready(self, pass_number, name):
        raise AssertionError("nothing happens there")


def wrapped_twice(rank):
    inner = DistributedDataParallel(build("mlp", seed=rank))
    for _ in range(2):
        loss(inner, batch("mlp", rank)).backward()
    inner.zero_grad()
    outer = DistributedDataParallel(torch.nn.Sequential(inner, torch.nn.Linear(8, 8)))
    loss(outer, batch("mlp", rank)).backward()
    grads = [p.grad.clone() for p in outer.parameters()]
    again = DistributedDataParallel(outer.module)
    try:
        DistributedDataParallel(outer.module[1])
    except AlreadyAttachedError as error:
        told = str(error)
    earlier = outer.synchronizer
    changed = earlier.graph_changed, outer.reducer._ddp_graph_static()
    earlier.observe(Watching())
    with earlier.trace("no folder is made"):
        earlier.shadow_pass()
    earlier.detach()
    loss(again, batch("mlp", rank)).backward()
    reduced = [p.grad.clone() for p in outer.parameters()]
    return grads, told, changed, inner.synchronizer.statistics.passes, reduced


def trunk_with_two_heads(rank, joint):
    """Parameters after some steps; without a rank, of one process that has the batches of both."""
    ranks = range(2) if rank is None else [rank]
    trunk, one, other = (build("mlp", seed=number) for number in range(3))
    nets = [torch.nn.Sequential(trunk, head) for head in (one, other)]
    wrappers = nets if rank is None else [DistributedDataParallel(net) for net in nets]
    parameters = [*dict.fromkeys(p for net in nets for p in net.parameters())]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        for who in ranks:
            losses = [loss(net, batch("mlp", who, step)) / len(ranks) for net in wrappers]
            (sum(losses) if joint else losses[step % 2]).backward()
        optimizer.step()
    return [p.detach().clone() for p in parameters]


def wrapped_in_turn(rank):
    trunk = build("mlp")
    nets = [torch.nn.Sequential(trunk, build("mlp", seed=number)) for number in (1, 2)]
    first, _ = [DistributedDataParallel(net) for net in nets]
    told = []
    nets[1][1].requires_grad_(False)
    for net in (nets[0], torch.nn.Sequential(trunk, build("mlp").requires_grad_(False))):
        try:
            DistributedDataParallel(net)
        except AlreadyAttachedError as error:
            told.append(str(error))
    loss(first, batch("mlp", rank)).backward()
    return told, [p.grad.clone() for p in first.parameters()]


def wrapped_when_unfrozen(rank, wrapper, keep):
    """Gradients of a trunk that was frozen in a first wrapper, then trained in one of its own; at last in the first."""
    trunk = build("mlp").requires_grad_(False)
    first = wrapper(torch.nn.Sequential(trunk, build("mlp", seed=1)))
    loss(first, batch("mlp", rank)).backward()
    trunk.requires_grad_(True)
    second = wrapper(trunk)
    first = first if keep else None
    for step in (1, 2):
        loss(second, batch("mlp", rank, step)).backward()
    grads = [p.grad.clone() for p in trunk.parameters()]
    if keep and wrapper is DistributedDataParallel:
        del second
        trunk.zero_grad()
        loss(first, batch("mlp", rank, 3)).backward()
    return grads, [p.grad for p in trunk.parameters()]


def two_groups(rank):
    model = DistributedDataParallel(build("mlp"))
    try:
        DistributedDataParallel(model.module, process_group=dist.new_group([0, 1]))
    except AlreadyAttachedError as error:
        return str(error)


def own_options(rank):
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    model = DistributedDataParallel(
        build("mlp"), weighted=True, reduce_dtype=torch.float64, launch_after=["0.weight"], process_groups=groups
    )
    model.synchronizer.weight = 1 + 2 * rank
    loss(model, batch("mlp", rank)).backward()
    summed = DistributedDataParallel(build("mlp"), reduce="sum", predivide_factor=2.0, delay=True, buffers="none")
    loss(summed, batch("mlp", rank)).backward()
    apart = DistributedDataParallel(build("mlp"), ignore=["*.bias"], last_bucket_cap_mb=0.0001)
    loss(apart, batch("mlp", rank)).backward()
    assert apart.synchronizer.plan.last_cap_bytes == int(0.0001 * 2**20)
    assert apart.parameters_to_ignore == {"0.bias", "2.bias", "4.bias"}
    return [[p.grad.clone() for p in one.parameters()] for one in (model, summed, apart)]


def one_weight(rank):
    """A wrapper, an input, and what tells the gradient of a backward alone: of this rank rank + 1, the mean 1.5."""
    ddp = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    x = torch.full((1, 1), rank + 1.0)

    def gradient(output):
        ddp.zero_grad()
        output.sum().backward()
        return ddp.module.weight.grad.item()

    return ddp, x, gradient


def inside_and_outside(rank):
    """Gradients of backwards outside ``no_sync``; at the end forward fails on rank 1 first."""
    ddp, x, gradient = one_weight(rank)
    with ddp.no_sync():
        inside = ddp(x)
    found = [gradient(inside), gradient(ddp.module(x)), gradient(ddp(x))]
    with ddp.no_sync():
        gradient(ddp(x))
    found.append(gradient(ddp.module(x)))
    with ddp.no_sync():
        inside = ddp(x)
    gradient(inside)
    with contextlib.suppress(RuntimeError):
        ddp(x if rank == 0 else torch.ones(1, 2))
    try:
        gradient(ddp(x))
    except PeerError as error:
        return found, str(error).splitlines()[0]


def kept_until_a_forward_outside(rank):
    """Gradients of what only forwards inside ``no_sync`` have made, after what does not arm the wrapper."""
    ddp, x, gradient = one_weight(rank)

    def inside(before=contextlib.nullcontext, after=contextlib.nullcontext):
        with ddp.no_sync():
            before()
            output = ddp(x)
            with after():
                pass
        return output

    evaluated = inside()
    with torch.no_grad():
        ddp(x)
    found = {"evaluated": gradient(evaluated), "nested": gradient(inside(after=ddp.no_sync))}
    twice = inside()
    with ddp.no_sync():
        pass
    found |= {"twice": gradient(twice), "after a backward": gradient(inside(before=lambda: gradient(ddp(x))))}
    with ddp.no_sync():
        ddp(x)
        ddp.require_backward_grad_sync = True
        by_hand = ddp(x)
    return found | {"by hand": gradient(by_hand)}


def all_scenes(rank):
    return {
        "frameworks": lightning_and_accelerate(rank),
        "pickled": pickled_and_loaded(rank),
        "uneven": {(divide, hook): uneven(rank, divide, hook) for divide in (True, False) for hook in (False, True)},
        "accumulating": accumulating_unevenly(rank),
        "early end": early_end(rank),
        "another group": another_group(rank),
        "buffer hooks": buffer_hooks(rank),
        "buffers off": buffers_off(rank),
        "brackets": names_with_brackets(rank),
        "amid": [attached_anew_amid_accumulation(rank, reduce) for reduce in ("mean", "sum")],
        "buffers later": buffers_set_later(rank),
        "asked before": asked_of_the_handle_before(rank),
        "alone": told_while_alone(rank),
        "set before": set_on_the_handle_before(rank),
        "in vain": wrapped_again_in_vain(rank),
        "traced": traced_around_join(rank),
        "several groups": copied_from_several_groups(rank),
        "wrapped twice": wrapped_twice(rank),
        **{("trunk", joint): trunk_with_two_heads(rank, joint) for joint in (True, False)},
        "two groups": two_groups(rank),
        "wrapped in turn": wrapped_in_turn(rank),
        "unfrozen": {
            (kept, wrapper is TorchDDP): wrapped_when_unfrozen(rank, wrapper, kept)
            for kept in (True, False)
            for wrapper in (TorchDDP, DistributedDataParallel)
        },
        "own options": own_options(rank),
        "inside and outside": inside_and_outside(rank),
        "kept": kept_until_a_forward_outside(rank),
        "behind join": inside_and_outside_behind_join(rank),
        "logged": logged_with_sparse_gradients(rank),
    }


@pytest.fixture(scope="module")
def scenes():
    return spawn_ranks(all_scenes, 2)


def one_process(steps_by_rank, divisor=2.0, name="mlp", weights=(1.0, 1.0)):
    """Gradients of the sum over ranks and their steps, divided."""
    model = build(name)
    for rank, steps in enumerate(steps_by_rank):
        for step in steps:
            (loss(model, batch(name, rank, step)) * (weights[rank] / divisor)).backward()
    return [p.grad for p in model.parameters()]


def same(first, second):
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.ranks
class TestTogether:
    def test_what_frameworks_call_around_backward(self, scenes):
        for found in scenes:
            torch.testing.assert_close(found["frameworks"], one_process([[0, 1], [0, 1]]))

    def test_a_loaded_wrapper_reduces_and_another_group_is_torchs_error(self, scenes):
        assert same(scenes[0]["pickled"][0], scenes[1]["pickled"][0])
        assert all("only supported when using DDP with the default process group" in s["pickled"][1] for s in scenes)

    @pytest.mark.parametrize("divide", [True, False])
    @pytest.mark.parametrize("with_hook", [False, True])
    def test_ranks_with_fewer_batches(self, divide, with_hook, scenes):
        (short, first, after), (long, second, then) = (scene["uneven"][divide, with_hook] for scene in scenes)
        assert [len(short), len(long)] == [2, 5]
        for mine, other in zip(short, long[:2], strict=True):
            assert same(mine, other)
        assert not same_bits(first, second)  # the last joiner's model, buffers included
        assert same(after, then)

    def test_a_mean_over_those_that_are_left_is_asked_for_by_name(self, scenes):
        full, left = (scenes[1]["uneven"][divide, False][0] for divide in (True, False))
        for step in (0, 1):
            torch.testing.assert_close(full[step], left[step])
        torch.testing.assert_close([2 * one for one in full[2]], left[2])  # the first step that rank 1 takes alone

    def test_passes_that_are_not_synchronised_need_no_word(self, scenes):
        assert not same_bits(scenes[0]["accumulating"], scenes[1]["accumulating"])

    def test_what_ran_forward_inside_no_sync_waits_for_a_forward_outside(self, scenes):
        """Past the wrapper too, unless its backward was inside as well."""
        for rank, scene in enumerate(scenes):
            found, told = scene["inside and outside"]
            assert found == [rank + 1.0, rank + 1.0, 1.5, 1.5]
            assert told == (
                f"rank {rank}, pass 3: forward failed on rank 1 before this pass and was caught, so this pass may mix "
                "batches."
            )

    def test_what_ran_forward_inside_stays_here_after_an_evaluation_and_another_no_sync(self, scenes):
        for rank, scene in enumerate(scenes):
            here = dict.fromkeys(("evaluated", "nested", "twice", "after a backward"), rank + 1.0)
            assert scene["kept"] == here | {"by hand": 1.5}

    def test_what_ran_forward_inside_stays_here_behind_join_too(self, scenes):
        assert [scene["behind join"] for scene in scenes] == [1.0, 2.0]

    def test_parameters_with_sparse_gradients_are_logged_with_the_others(self, scenes):
        assert scenes[0]["logged"] == [3, 3 * 2 * 4 + 3 * 8, "double, float"]

    def test_an_early_end_is_raised_on_all_ranks(self, scenes):
        assert scenes[0]["early end"] == (2, "Rank 0 exhausted all inputs.")
        done, message = scenes[1]["early end"]
        assert done == 2 and message.startswith("Detected at least one rank that exhausted inputs.")

    def test_another_group_of_ranks(self, scenes):
        for rank, scene in enumerate(scenes):
            local, together = scene["another group"]
            torch.testing.assert_close(local, one_process([[0] if r == rank else [] for r in range(2)], 1.0))
            torch.testing.assert_close(together, one_process([[0], [0]]))

    def test_a_buffer_hook_replaces_what_is_done_to_buffers(self, scenes):
        assert scenes[0]["buffer hooks"] == scenes[1]["buffer hooks"] == [3.0] * 4

    def test_whatever_is_false_leaves_buffers_to_each_rank(self, scenes):
        assert [scene["buffers off"] for scene in scenes] == [[1.0] * 9, [2.0, 2.0, 1.0] * 3]

    def test_what_torch_names_is_no_pattern(self, scenes):
        assert [scene["brackets"] for scene in scenes] == [[1.0, 1.0], [2.0, 1.0]]

    def test_what_is_attached_anew_reduces_what_was_accumulated_before(self, scenes):
        for scene in scenes:
            assert scene["amid"] == [[[9.5, 11.0, 1.5, 1.0]] * 2, [[11.0, 14.0, 3.0, 2.0]] * 2]

    def test_flags_of_buffers_may_be_set_later_and_what_is_said_of_them_is_so(self, scenes):
        for rank, scene in enumerate(scenes):
            found, policy, says = scene["buffers later"]
            follow, own, mean = (True, 1.0), (False, 1.0 + rank), (True, 1.5)
            assert found == [follow, own, own, own, own, own, *[mean] * 3, own, follow, follow]
            assert (policy, says) == ("none", True)

    def test_what_was_asked_of_a_handle_stays_where_the_wrapper_attaches_anew(self, scenes):
        found = [scene["asked before"] for scene in scenes]
        assert found == [(1.0, pytest.approx(5 / 3), "none", [1]), (2.0, pytest.approx(5 / 3), "none", [1])]

    def test_observers_stay_where_a_rank_was_alone_meanwhile(self, scenes):
        assert [scene["alone"] for scene in scenes] == [([1, 1], [], True), ([1, 1], [], False)]

    def test_hooks_and_the_rate_of_recording_stay_too_where_the_handle_was_given_them(self, scenes):
        assert [scene["set before"] for scene in scenes] == [([0], 1.5, 7)] * 2

    def test_a_wrapper_that_cannot_be_made_says_that_the_earlier_one_has_ended(self, scenes):
        for rank, scene in enumerate(scenes):
            assert scene["in vain"] == (
                f'rank {rank}: reduce=\'median\' is not known: use one of "mean", "sum"\n'
                "What averaged the gradients here before has ended: wrap the module again."
            )

    def test_a_trace_around_what_attaches_anew_says_what_it_lacks(self, scenes):
        for rank, scene in enumerate(scenes):
            assert scene["traced"] == (
                [2, 0],
                [
                    f"rank {rank}: sync.trace('/around') has recorded nothing since the model was attached anew, by "
                    "join() or a new wrapper.\n"
                    "Begin it behind that: with model.synchronizer.trace(folder), inside of with model.join()."
                ],
            )

    def test_a_copy_of_a_wrapper_over_several_groups_uses_the_default_one(self, scenes):
        assert [scene["several groups"] for scene in scenes] == [(0.5, None)] * 2

    def test_wrapping_again_hands_over(self, scenes):
        assert same(scenes[0]["wrapped twice"][0], scenes[1]["wrapped twice"][0])
        assert scenes[0]["wrapped twice"][1] == (
            "DistributedDataParallel: weight, bias already reduced by another wrapper or handle, with parameters that "
            "this module does not have.\nUse this one as it is, unwrapped: its gradients are the mean. "
            "Or wrap the outer module last, or delete its wrapper first if it is not needed any more."
        )
        assert [scene["wrapped twice"][2:4] for scene in scenes] == [((False, True), 2)] * 2  # of those that have ended
        assert same(scenes[0]["wrapped twice"][4], scenes[1]["wrapped twice"][4])

    @pytest.mark.parametrize("joint", [True, False], ids=["one backward for both", "in turn"])
    def test_two_wrappers_have_layers_in_common(self, scenes, joint):
        """The earlier one goes on, and the later one takes its head."""
        torch.testing.assert_close(scenes[0]["trunk", joint], trunk_with_two_heads(None, joint), rtol=0, atol=1e-6)
        assert same(scenes[0]["trunk", joint], scenes[1]["trunk", joint])

    def test_who_has_left_layers_to_a_wrapper_counts_on_it(self, scenes):
        """The first one is wrapped again, then the trunk with layers that are not trained."""
        names = "0.0.weight, 0.0.bias, 0.2.weight, 0.2.bias, 0.4.weight, 0.4.bias (+6 more)"
        assert scenes[0]["wrapped in turn"][0] == [
            "DistributedDataParallel: this module is wrapped already, and another wrapper leaves the layers that both "
            "share to that one.\nUse the existing wrapper.",
            f"DistributedDataParallel: {names} already reduced by another wrapper or handle, with parameters that "
            "this module does not have.\nUse this one as it is, unwrapped: its gradients are the mean. "
            "Or wrap the outer module last, or delete its wrapper first if it is not needed any more.",
        ]
        assert same(scenes[0]["wrapped in turn"][1], scenes[1]["wrapped in turn"][1])

    @pytest.mark.parametrize("kept", [True, False], ids=["kept", "freed"])
    def test_what_was_frozen_in_an_earlier_wrapper_is_the_later_ones(self, scenes, kept):
        """As when an adapter has been trained and is merged, and the base is trained on; the earlier one may go on."""
        for (grads, last), (torchs, _) in [(s["unfrozen"][kept, False], s["unfrozen"][kept, True]) for s in scenes]:
            assert same(grads, torchs)
            assert same(last, scenes[0]["unfrozen"][kept, False][1])

    def test_over_two_groups_none_takes_over(self, scenes):
        assert scenes[0]["two groups"] == (
            "DistributedDataParallel: 0.weight, 0.bias, 2.weight, 2.bias, 4.weight, 4.bias already reduced by another "
            "wrapper or handle, over another group.\nWrap both over the same group."
        )

    def test_options_of_stretto(self, scenes):
        weighted, summed, apart = scenes[0]["own options"]
        torch.testing.assert_close(weighted, one_process([[0], [0]], 4.0, weights=(1.0, 3.0)))
        torch.testing.assert_close(summed, one_process([[0], [0]], 1.0))
        torch.testing.assert_close(apart[::2], one_process([[0], [0]])[::2])
        torch.testing.assert_close(apart[1::2], one_process([[0], []], 1.0)[1::2])


def test_a_mesh_and_a_group_exclude_each_other():
    with pytest.raises(SetupError, match="Cannot specify both process_group and device_mesh"):
        DistributedDataParallel(torch.nn.Linear(1, 1), process_group=object(), device_mesh=object())


def test_a_profiler_finds_torchs_name_of_forward():
    wrapped = DistributedDataParallel(torch.nn.Linear(1, 1))
    with torch.profiler.profile() as profiled:
        wrapped(torch.ones(1, 1))
    assert "DistributedDataParallel.forward" in {event.key for event in profiled.key_averages()}
