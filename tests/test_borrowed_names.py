"""Names of other packages that are private or undocumented, and used here: a release without them fails here first.

`pyproject.toml` bounds such packages from above. To raise a bound, run this and the tests of the code that borrows.
"""

import ast
import importlib
import inspect
import re
import textwrap
import tomllib
from pathlib import Path

import pytest

PROTOCOL = "uvicorn.protocols.http.httptools_impl"
SERVER = "uvicorn.server"
FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel"
FLAT = "torch.distributed.fsdp._flat_param"
USES = [  # module, class or nothing, names, why
    (PROTOCOL, "HttpToolsProtocol", "connection_made", "makes room, or refuses"),
    (PROTOCOL, "HttpToolsProtocol", "connection_lost", "forgets the deadlines"),
    (PROTOCOL, "HttpToolsProtocol", "data_received", "replaced: bounds what is not parsed yet"),
    (PROTOCOL, "HttpToolsProtocol", "on_message_begin", "begins a head"),
    (PROTOCOL, "HttpToolsProtocol", "on_url", "counts"),
    (PROTOCOL, "HttpToolsProtocol", "on_header", "counts; drops trailers"),
    (PROTOCOL, "HttpToolsProtocol", "on_headers_complete", "bounds the requests that wait; one Host"),
    (PROTOCOL, "HttpToolsProtocol", "on_body", "counts"),
    (PROTOCOL, "HttpToolsProtocol", "on_message_complete", "ends a request"),
    (PROTOCOL, "HttpToolsProtocol", "on_response_complete", "waits for the next head"),
    (PROTOCOL, "HttpToolsProtocol", "pause_writing resume_writing", "bounds how long a client may not read"),
    (PROTOCOL, "HttpToolsProtocol", "_unset_keepalive_if_required", "data_received is replaced"),
    (PROTOCOL, "HttpToolsProtocol", "parser", "feeds it; the version of a request"),
    (PROTOCOL, "HttpToolsProtocol", "headers", "counts them, and Host among them"),
    (PROTOCOL, "HttpToolsProtocol", "cycle", "whether an answer is due; the last before the end"),
    (PROTOCOL, "HttpToolsProtocol", "pipeline", "the requests that wait"),
    (PROTOCOL, "HttpToolsProtocol", "flow", "replaced: reads on once none waits"),
    (PROTOCOL, "HttpToolsProtocol", "connections", "those that are open"),
    (PROTOCOL, "HttpToolsProtocol", "transport", "writes an error, closes"),
    (PROTOCOL, "HttpToolsProtocol", "client", "the log's"),
    (PROTOCOL, "HttpToolsProtocol", "loop", "deadlines"),
    (PROTOCOL, "RequestResponseCycle", "response_started", "an error is not written into an answer"),
    (PROTOCOL, "RequestResponseCycle", "response_complete", "whether an answer is due"),
    (PROTOCOL, "RequestResponseCycle", "more_body", "whether it waits for its client"),
    (PROTOCOL, "RequestResponseCycle", "keep_alive", "False: the connection ends after this answer"),
    ("uvicorn.protocols.http.flow_control", "FlowControl", "resume_reading", "reads on once none waits"),
    (SERVER, "Server", "startup started", "says where it listens"),
    (SERVER, "Server", "servers", "the port that it took"),
    ("httptools", "HttpRequestParser", "feed_data", "data_received is replaced"),
    ("httptools", "", "HttpParserError", "no HTTP, or a callback that stopped it"),
    ("httptools", "", "HttpParserUpgrade", "what follows an upgrade is not read"),
    ("dash", "Dash", "index", "the document brings its page along"),
    ("dash", "Dash", "config", "where the assets are"),
    ("dash", "Dash", "_collect_and_register_resources", "an asset's address changes with its content alone"),
    ("dash", "Dash", "_callback_list", "what a page asks for first is in the document"),
    ("flask_session.base", "ServerSideSessionInterface", "regenerate", "a new session id at sign-in"),
    ("flask_session.base", "ServerSideSessionInterface", "get_cookie_secure", "Secure where HTTPS was used"),
    ("starlette.routing", "", "compile_path", "access rules are matched as routes are"),
    ("torch", "Tensor", "_version", "a write in place raises it"),
    ("torch", "Tensor", "_values", "the rows of a sparse gradient, without a copy"),
    ("torch", "", "_foreach_norm _foreach_copy_ _foreach_add_", "one call for many tensors"),
    ("torch.nn", "Module", "_modules", "tells a module from a proxy of one"),
    ("torch.optim", "Optimizer", "_optimizer_step_pre_hooks", "whether a watch hooks it"),
    ("torch.optim", "Optimizer", "_optimizer_load_state_dict_post_hooks", "the constructor was called"),
    ("torch.distributed.distributed_c10d", "", "_get_default_store", "ranks agree on a run"),
    ("torch.distributed.checkpoint._traverse", "", "get_element set_element", "paths in a state dict"),
    ("torch.distributed.checkpoint.default_planner", "", "_EmptyStateDictLoadPlanner", "reads all that is there"),
    ("torch.distributed.checkpoint.state_dict_loader", "", "_load_state_dict", "the same, without a process group"),
    ("torch.distributed.checkpoint.filesystem", "", "_StorageInfo", "stands in an index"),
    ("torch.distributed.checkpoint.metadata", "", "_MEM_FORMAT_ENCODING", "the same"),
    ("torch.serialization", "", "_get_layout", "the same"),
    (FSDP, "FullyShardedDataParallel", "_handle", "the flat parameter of a wrapper"),
    (FSDP, "FullyShardedDataParallel", "_fsdp_wrapped_module", "left out of names"),
    (FLAT, "FlatParameter", "_fqns", "the tensors that it holds pieces of"),
    (FLAT, "FlatParameter", "_params _shapes _param_infos _shard_param_infos", "the same, registered"),
    ("torch.distributed.fsdp", "FSDPModule", "_get_fsdp_state", "dtypes that shards are cast to"),
    ("torch._inductor.codegen.cpp", "CppVecOverrides", "to_dtype_bitcast", "casts in registers"),
    ("torch._inductor.codegen.cpp", "CppVecKernel", "_get_num_vectors", "the same"),
    ("torch._inductor.virtualized", "_V", "kernel", "the same"),
    ("torch._inductor", "", "compile", "compiled code called directly"),
]
BORROWED = [(module, owner, name, why) for module, owner, names, why in USES for name in names.split()]
BORROWERS = [
    ("collage_server.web.protocol", "BoundedProtocol"),
    ("collage_server.web.protocol", "_PipelineFlow"),
    ("collage_server.command.serve", "Server"),
    ("collage_dashboard.prerendering", "PrerenderingDash"),
]
DASH_ROUTES = {"/_dash-layout", "/_dash-dependencies", "/_dash-update-component"}
OWN = ("self", "super")
BOUNDED = {"dash", "flask-session", "httptools", "torch", "uvicorn"}
"""starlette comes with fastapi."""


def names_of(kind):
    """The names of a class: its attributes, those that it declares, and what its methods set on `self`."""
    found = {name for name in dir(kind) if not name.startswith("__")}
    for base in kind.__mro__:
        found |= vars(base).get("__annotations__", {}).keys()
        if any(inspect.isfunction(member) for member in vars(base).values()):
            found |= {node.attr for node in own_attributes(base) if isinstance(node.ctx, ast.Store)}
    return found


def own_attributes(kind):
    """Each place of a class's source, where there is one, that names an attribute of `self` or `super()`."""
    try:
        source = inspect.getsource(kind)
    except OSError:  # A class of torch's that gives another module for its own.
        return
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        if isinstance(node, ast.Attribute) and getattr(getattr(node.value, "func", node.value), "id", "") in OWN:
            yield node


@pytest.mark.slow
@pytest.mark.parametrize(("module", "owner", "name", "why"), BORROWED)
def test_what_is_borrowed_is_there(module, owner, name, why):
    found = pytest.importorskip(module.partition(".")[0]) and importlib.import_module(module)
    assert name in (names_of(getattr(found, owner)) if owner else vars(found)), why


@pytest.mark.parametrize(("module", "name"), BORROWERS)
def test_what_a_class_takes_from_its_foreign_base_is_listed(module, name):
    pytest.importorskip("uvicorn" if module.startswith("collage_server") else "dash")
    kind = getattr(importlib.import_module(module), name)
    base = kind.__mro__[1]
    listed = {f"{owner}.{name}" for _, owner, name, _ in BORROWED}
    taken = {node.attr for node in own_attributes(kind)} | set(vars(kind))
    taken &= names_of(base)
    assert {f"{base.__name__}.{name}" for name in taken} <= listed


def test_the_routes_that_a_document_answers_ahead_are_dashs():
    dash = pytest.importorskip("dash")
    assert {
        str(rule) for rule in dash.Dash(__name__, add_log_handler=False).server.url_map.iter_rules()
    } >= DASH_ROUTES


def test_each_package_is_bounded_from_above():
    root = Path(__file__).parents[1]
    files = (root / "pyproject.toml", root / "agent" / "pyproject.toml", root / "server" / "pyproject.toml")
    projects = [tomllib.loads(file.read_text(encoding="utf-8"))["project"] for file in files]
    needed = [one for given in projects for one in given["dependencies"]]
    needed += [one for given in projects for own in given.get("optional-dependencies", {}).values() for one in own]
    bounded = {re.split(r"[\[<>=]", one)[0] for one in needed if "<" in one}
    assert bounded >= BOUNDED
