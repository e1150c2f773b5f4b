"""Names: ampkit exports what it means to export, and the names on its pages exist."""

import ast
import importlib
import inspect
import re
import tomllib
import types

import pytest
from helpers import ROOT, python

import ampkit

EXPORTED = """
    initialize session scale_loss clip_grad_norm_ master_params step_was_skipped disable_casts keep_casts close current_session
    state_dict load_state_dict from_grad_scaler to_grad_scaler
    half_function bfloat16_function float_function promote_function cast_inputs
    register_half_function register_bfloat16_function register_float_function register_promote_function
    DynamicLossScale GradScaler Policy
    AmpkitError CheckpointError ClosureError ConfigurationError ExtensionError LossIdError LossScaleError
    NotInitializedError RefusedOperation
""".split()

# Imported when they are first asked for.
INSIGHT = ["check_updates", "diagnose", "explain", "loss_scale", "on_step", "recording", "tune"]

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_package_exports_these_names_and_no_others():
    here = [name for name, value in vars(ampkit).items() if not isinstance(value, types.ModuleType)]
    assert {name for name in here if not name.startswith("_")} <= {*EXPORTED, *INSIGHT}
    assert [name for name in EXPORTED if isinstance(getattr(ampkit, name), types.ModuleType)] == []
    assert sorted(ampkit.__all__) == sorted([*EXPORTED, *INSIGHT, "optimizers", "parallel"])
    with pytest.raises(AttributeError, match="has no attribute 'diagnosis'"):
        getattr(ampkit, "diagnosis")  # noqa: B009


def test_dir_shows_what_is_exported_and_no_rooms_of_the_package():
    import ampkit.apex  # a room that became an attribute late

    assert sorted(name for name in dir(ampkit) if not name.startswith("_")) == sorted(
        [*EXPORTED, *INSIGHT, "optimizers", "parallel"]
    )


@pytest.mark.parametrize(
    "name, instead",
    [
        ("amp", "ampkit.initialize"), ("autocast", "ampkit.disable_casts()"), ("custom_bwd", "by themselves"),
        ("custom_fwd", "ampkit.float_function"), ("scale", "with ampkit.scale_loss"), ("unscale_", "between the block and"),
        ("update", "by itself"),
    ],
)  # fmt: skip
def test_names_of_torch_amp_say_what_does_that_here(name, instead):
    assert not hasattr(ampkit, name)
    with pytest.raises(AttributeError, match=f"no attribute '{name}': .*{re.escape(instead)}"):
        getattr(ampkit, name)
    for used in re.findall(r"ampkit\.(\w+)", ampkit._INSTEAD[name]):
        assert used == "amp" or used in ampkit.__all__
    assert set(ampkit._INSTEAD) == {"amp", "autocast", "custom_bwd", "custom_fwd", "scale", "unscale_", "update"}


ROOMS_OF_OPTIMIZERS = {"dtypes", "errors", "kernels", "libraries", "logs", "optimizers", "patching", "sharding"}
OF_AMPKIT = "{name.split('.')[1] for name in sys.modules if name.startswith('ampkit.')}"


@pytest.mark.parametrize(
    "script, printed",
    [
        (
            "import sys, torch; before = set(sys.modules); import ampkit;"
            "print(ampkit.parallel.convert_syncbn_model.__name__, ampkit.optimizers.FusedAdam.__name__);"
            "print([name for name in sys.modules.keys() - before if name.startswith('torch.distributed')])",
            ["convert_syncbn_model FusedAdam", "[]"],
        ),
        (
            f"import sys, ampkit.optimizers; print({{one for one in {OF_AMPKIT} if one[0] != '_'}} ^ {ROOMS_OF_OPTIMIZERS})",
            ["set()"],
        ),
        (
            "import ampkit.session, ampkit; print(ampkit.session.__module__); from ampkit import session; print(session.__name__)",
            ["ampkit.api", "session"],
        ),
        (f"import sys, ampkit; print('insight' in {OF_AMPKIT}); ampkit.diagnose", ["False"]),
    ],
    ids=[
        "ampkit gives parallel and optimizers, and loads no more of torch.distributed",
        "optimizers alone load neither casts nor sessions",
        "the module of sessions does not hide the function",
        "ampkit loads nothing that looks at a script",
    ],
)
def test_an_import_alone(script, printed):
    done = python("-c", script)
    assert done.stdout.splitlines() == printed, done.stderr


@pytest.mark.parametrize("name", [*EXPORTED, *INSIGHT])
def test_exported_name_is_documented_and_lives_in_ampkit(name):
    value = getattr(ampkit, name)
    assert inspect.getdoc(value) and value.__module__.startswith("ampkit.")


def test_errors_can_be_caught_as_one():
    for name in EXPORTED:
        if name.endswith("Error") or name == "RefusedOperation":
            assert issubclass(getattr(ampkit, name), ampkit.AmpkitError), name
    assert issubclass(ampkit.LossScaleError, FloatingPointError)


def test_version_is_the_one_that_is_packed():
    """ampkit alone defines the version; setuptools reads it there, and ``make wheel`` puts it in file names."""
    from setuptools.config.pyprojecttoml import read_configuration

    assert "version" not in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert ampkit.__version__ == read_configuration(ROOT / "pyproject.toml")["project"]["version"]


def resolved(dotted):
    """Return what ``ampkit.a.b`` names; raises AttributeError or ImportError where it names nothing."""
    if dotted.startswith("ampkit.integrations."):
        return resolved_in_adapter(*dotted.split(".")[2:])
    value = ampkit
    for index, name in enumerate(names := dotted.split(".")[1:]):
        if isinstance(value, types.ModuleType) and not hasattr(value, name):
            importlib.import_module(".".join(["ampkit", *names[: index + 1]]))
        value = getattr(value, name)
    return value


def resolved_in_adapter(module, *name):
    """Look names up in the source of an adapter, without an import: its framework may be missing."""
    tree = ast.parse((ROOT / "ampkit" / "integrations" / f"{module}.py").read_text())
    if not set(name) <= {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}:
        raise AttributeError(f"{module} has no {name}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_on_the_pages_exist(page):
    # Not `kernels.py` and the like: names of files end in .py.
    names = {name for name in re.findall(r"(?<![\w./-])ampkit(?:\.[A-Za-z_]\w*)+", page.read_text())}
    for name in sorted(names):
        if not name.endswith(".py"):
            resolved(name)


def test_environment_variables_on_the_pages_are_read_somewhere():
    sources = [*(ROOT / "ampkit").rglob("*.py"), *(ROOT / "csrc").rglob("*.cpp"), ROOT / "setup.py"]
    read = {name for path in sources for name in re.findall(r"AMPKIT_[A-Z_]+", path.read_text())}
    promised = {name for page in PAGES for name in re.findall(r"AMPKIT_[A-Z_]+", page.read_text())}
    assert promised and promised <= read
