"""What the script's source text says: imports, the loop they imply, and values written as literals. It is parsed, never run."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from launchguard.configs._syntax import callee
from launchguard.configs.script_saves import Gather, gathers_of
from launchguard.job import LaunchSpec, Origin, Setting

# Classes and functions whose call decides something; the value is a loop or a strategy.
_LOOPS = {"SFTTrainer": "sft", "DPOTrainer": "dpo", "Seq2SeqTrainer": "trainer", "Trainer": "trainer"}
_OTHER_LOOPS = ("GRPOTrainer", "RLOOTrainer", "PPOTrainer", "KTOTrainer", "RewardTrainer", "PRMTrainer", "ORPOTrainer", "CPOTrainer",
                "OnlineDPOTrainer", "GKDTrainer", "DistillationTrainer")  # fmt: skip
_OTHER_FRAMEWORKS = ("lightning", "pytorch_lightning", "composer", "megatron", "torchtitan", "colossalai")
_STRATEGIES = {"fully_shard": "fsdp2", "FSDP": "fsdp1", "FullyShardedDataParallel": "fsdp1",
               "DDP": "ddp", "DistributedDataParallel": "ddp"}  # fmt: skip
_ARGUMENT_CLASSES = ("TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig", "DPOConfig")
_OTHER_ARGUMENT_CLASSES = ("GRPOConfig", "RLOOConfig", "PPOConfig", "KTOConfig", "RewardConfig", "PRMConfig", "ORPOConfig", "CPOConfig",
                           "OnlineDPOConfig", "GKDConfig")  # fmt: skip
ARGUMENT_PARSERS = ("parse_args_into_dataclasses", "parse_args_and_config", "parse_yaml_file", "parse_json_file")
ARGUMENT_MAKERS = (*_ARGUMENT_CLASSES, *ARGUMENT_PARSERS)  # what makes a Trainer's arguments
_CLASS_LISTS = ("transformer_layer_cls", "module_classes")  # keywords that hold classes; their names are what matters
_READ = (
    *_ARGUMENT_CLASSES, *_OTHER_ARGUMENT_CLASSES, *ARGUMENT_PARSERS, *_LOOPS, *_OTHER_LOOPS, *_STRATEGIES,
    "Accelerator", "LoraConfig", "BitsAndBytesConfig", "from_pretrained",
    "from_config", "MixedPrecisionPolicy", "MixedPrecision", "autocast", "SGD", "Adam", "AdamW", "prepare_model_for_kbit_training",
    "initialize", "Init", "partial", "transformer_auto_wrap_policy", "ModuleWrapPolicy", "DataParallel", "DataLoader", "backward",
    "AdamW8bit", "Adam8bit", "PagedAdamW8bit", "PagedAdam8bit", "PagedAdamW32bit", "Lion8bit", "PagedLion8bit", "PagedLion32bit",
    "Adafactor",
    "FullyShardedDataParallelPlugin", "DeepSpeedPlugin", "HfDeepSpeedConfig",
)  # fmt: skip
# Libraries that take no arguments of a script's from its command line; what another one reads is not known here.
_LIBRARIES = frozenset(
    "torch torchvision transformers accelerate deepspeed datasets peft trl bitsandbytes diffusers evaluate numpy pandas sklearn scipy tqdm "
    "wandb tensorboard safetensors huggingface_hub tokenizers sentencepiece PIL yaml packaging einops flash_attn liger_kernel".split()
)
_ENUMS = ("ShardingStrategy", "BackwardPrefetch", "StateDictType")  # of torch.distributed.fsdp; a member is meant by its name
_DTYPES = ("bfloat16", "float16", "float32", "half", "float64")


@dataclass(frozen=True)
class Call:
    """One call in the script. owner: what stands before the dot; keywords: those that are literals; references: keyword, or position
    as text, -> attribute it takes its value from ("batch_size" of args.batch_size); names: keywords that are given and not None, "**" for
    a mapping of them; scope: function it stands in, "" for the module;
    guard: the name that an `if args.name:` round it asks, "" without one."""

    name: str
    owner: str
    origin: Origin
    positional: tuple[Any, ...]
    keywords: Mapping[str, Setting]
    references: Mapping[str, str] = field(default_factory=dict)
    names: frozenset[str] = frozenset()
    scope: str = ""
    guard: str = ""

    def runs(self, given: Mapping[str, Setting]) -> bool:
        """False when the condition round the call is known not to hold."""
        return not self.guard or self.guard not in given or bool(given[self.guard].value)

    def bound(self, given: Mapping[str, Setting]) -> Call:
        """The call with its references replaced by the script's arguments of that name."""
        found = {place: given[name] for place, name in self.references.items() if name in given}
        positional = tuple(found[str(at)].value if str(at) in found else value for at, value in enumerate(self.positional))
        keywords = {**{place: setting for place, setting in found.items() if not place.isdigit()}, **self.keywords}
        return replace(self, positional=positional, keywords=keywords)


@dataclass(frozen=True)
class ScriptSource:
    """name: the script as the origin shows it; used: names it refers to, with their first line; defaults: of its argparse flags;
    modules: top-level names of what it imports; unused_lora: a LoraConfig that is assigned and never read again; pinned_device: the first
    "cuda:0" in it; gathers: whole-model state dicts that it makes itself; saves_optimizer: where it makes one of the optimizer;
    invoked: name of a called function -> scope and line of its first call; declared: names of its own argparse flags and class fields."""

    name: str = ""
    calls: tuple[Call, ...] = ()
    used: Mapping[str, Origin] = field(default_factory=dict)
    defaults: Mapping[str, Setting] = field(default_factory=dict)
    modules: Mapping[str, Origin] = field(default_factory=dict)
    unused_lora: Origin | None = None
    pinned_device: Origin | None = None
    gathers: tuple[Gather, ...] = ()
    saves_optimizer: Origin | None = None
    invoked: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    declared: frozenset[str] = frozenset()

    def bound(self, given: Mapping[str, Setting]) -> ScriptSource:
        """The source with every `args.name` in its calls replaced by what the script was given."""
        return replace(self, calls=tuple(call.bound(given) for call in self.calls if call.runs(given)))

    def not_modelled(self) -> Setting | None:
        """A framework or trainer whose loop is not modelled."""
        for name in (*_OTHER_FRAMEWORKS, *_OTHER_LOOPS):
            if name in self.modules or name in self.used:
                return Setting(name, self.modules.get(name) or self.used[name])
        return None

    def first(self, *names: str) -> Call | None:
        """The first call of one of these names."""
        return next((call for call in self.calls if call.name in names), None)

    def foreign(self) -> set[str]:
        """Modules whose code may read the command line: all that are neither Python's nor well-known libraries."""
        return set(self.modules) - sys.stdlib_module_names - _LIBRARIES

    def loop(self) -> Setting | None:
        """Whose training loop the script runs, if one of the known classes is used in it."""
        other = self.not_modelled()
        if other is not None:
            return Setting("torch" if other.value in _OTHER_FRAMEWORKS else "trainer", other.origin)
        for name, loop in _LOOPS.items():
            if name in self.used:
                return Setting(loop, self.used[name])
        for call in self.calls:
            if call.name == "initialize" and call.owner == "deepspeed":
                return Setting("deepspeed", call.origin)
        if "Accelerator" in self.used:
            return Setting("accelerate", self.used["Accelerator"])
        plain = next((call for call in self.calls if call.name == "backward" and not call.positional), None)  # engine.backward(loss) is not
        return Setting("torch", plain.origin) if plain is not None else None

    def strategy(self) -> Setting | None:
        """The wrapper that a hand-written loop puts round its model."""
        for name, strategy in _STRATEGIES.items():
            call = self.first(name)
            if call is not None:
                return Setting(strategy, call.origin)
        return None

    def arguments(self) -> dict[str, Setting]:
        """Arguments of TrainingArguments(...) and its relatives that are written in the code."""
        call = self.first(*_ARGUMENT_CLASSES, *_OTHER_ARGUMENT_CLASSES)
        return dict(call.keywords) if call else {}

    def argument_class(self) -> str | None:
        """The first class of training arguments that the script names."""
        return next((name for name in reversed(_ARGUMENT_CLASSES) if name in self.used), None)

    def task(self) -> Setting | None:
        """The auto class whose from_pretrained or from_config makes the model."""
        for call in self.calls:
            if call.name in ("from_pretrained", "from_config") and call.owner.startswith("AutoModel"):
                return Setting(call.owner, call.origin)
        return None

    def model_call(self) -> Call | None:
        """The call that loads the model, or makes it."""
        for name in ("from_pretrained", "from_config"):
            found = next((call for call in self.calls if call.name == name and "Model" in call.owner), None)
            if found is not None:
                return found
        return None

    def trainer_call(self) -> Call | None:
        """The call that makes the Trainer."""
        return next((call for call in self.calls if call.name in _LOOPS), None)

    def loader_batch(self) -> Setting | None:
        """batch_size of the first DataLoader(...) whose size can be read, of those that shuffle where there are such."""
        loaders = [call for call in self.calls if call.name == "DataLoader"]
        shuffling = [call for call in loaders if "shuffle" in call.keywords and call.keywords["shuffle"].value]
        for call in shuffling or loaders:
            size = call.keywords.get("batch_size") or (Setting(call.positional[1], call.origin) if len(call.positional) > 1 else None)
            if size is not None and isinstance(size.value, int) and not isinstance(size.value, bool) and size.value > 0:
                return size
        return None

    def model_name(self) -> Setting | None:
        """The model's name where it is written in the code: from_pretrained("x"), SFTTrainer("x", ...), SFTTrainer(model="x")."""
        for call in (self.model_call(), self.first(*_LOOPS, *_OTHER_LOOPS)):
            if call is None:
                continue
            named = call.keywords.get("model") or call.keywords.get("pretrained_model_name_or_path")
            value = named.value if named else call.positional[0] if call.positional else None
            if isinstance(value, str):
                return Setting(value, call.origin)
        return None

    def model_before(self, *makers: str) -> Setting | None:
        """The loading call, when the first call of one of these names runs only after it: zero.Init is then not yet on."""
        model, made = self.model_call(), self.first(*makers)
        if model is None or made is None:
            return None
        first, second = self._places(model), self._places(made)
        scope = next((scope for scope in first if scope in second), None)
        return Setting(True, model.origin) if scope is not None and first[scope] < second[scope] else None

    def _places(self, call: Call) -> dict[str, int]:
        """Scope -> line at which it gets to this call: the call itself, the call of the function it stands in, and so on outwards."""
        found, scope, line = {}, call.scope, int(call.origin.key)
        while scope not in found:
            found[scope] = line
            if not scope or scope not in self.invoked:
                break
            scope, line = self.invoked[scope]
        return found

    def wrapped_classes(self) -> Setting | None:
        """Names of the layer classes that an FSDP1 wrap policy is given."""
        for call in self.calls:
            for name in _CLASS_LISTS:
                if name in call.keywords:
                    return call.keywords[name]
        return None


def read(launch: LaunchSpec) -> ScriptSource:
    """The source of the launch's script; empty when there is none, it is not Python, or it does not parse (it would not run either)."""
    path = _path(launch)
    if path is None:
        return ScriptSource()
    try:
        with open(path, encoding="utf-8") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return ScriptSource()
    name = launch.script if launch.script and not launch.is_module else os.path.relpath(path, launch.cwd)
    reader = _Reader(name)
    reader.visit(tree)
    unused = next((origin for variable, origin in reader.lora_variables.items() if variable not in reader.read_names), None)
    gathers, optimizer = gathers_of(tree, name)
    return ScriptSource(
        name, tuple(reader.calls), reader.used, reader.defaults, reader.modules, unused, reader.pinned_device, gathers, optimizer,
        reader.invoked, frozenset(reader.declared),
    )  # fmt: skip


def _path(launch: LaunchSpec) -> str | None:
    """The script's file. A module is looked for under cwd and sys.path by name: finding it the usual way would import its parents."""
    if launch.script is None:
        return None
    if not launch.is_module:
        path = os.path.join(launch.cwd, launch.script)
        return path if os.path.isfile(path) else None
    relative = launch.script.replace(".", os.sep)
    for folder in (launch.cwd, *sys.path):
        for candidate in (os.path.join(folder, relative + ".py"), os.path.join(folder, relative, "__main__.py")):
            if os.path.isfile(candidate):
                return candidate
    return None


class _Reader(ast.NodeVisitor):
    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[Call] = []
        self.used: dict[str, Origin] = {}
        self.defaults: dict[str, Setting] = {}
        self.modules: dict[str, Origin] = {}
        self.lora_variables: dict[str, Origin] = {}
        self.read_names: set[str] = set()
        self.pinned_device: Origin | None = None
        self.invoked: dict[str, tuple[str, int]] = {}
        self.declared: set[str] = set()
        self._constants: dict[str, Any] = {}
        self._scope = ""
        self._guard = ""

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Fields of a dataclass are script arguments (HfArgumentParser), with the defaults that they have there."""
        self.declared |= {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
        if any(callee(d.func if isinstance(d, ast.Call) else d)[0] == "dataclass" for d in node.decorator_list):
            for field_ in (n for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name) and n.value is not None):
                known, value = _value(field_.value, self._constants) if field_.value is not None else (False, None)
                if known and value is not None:
                    self.defaults.setdefault(field_.target.id, Setting(value, self._origin(field_)))  # type: ignore[union-attr]
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        outer = self._guard
        self._guard = node.test.attr if isinstance(node.test, ast.Attribute) else node.test.id if isinstance(node.test, ast.Name) else outer
        for child in node.body:
            self.visit(child)
        self._guard = outer
        self.visit(node.test)
        for child in node.orelse:
            self.visit(child)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer, self._scope = self._scope, node.name
        self.generic_visit(node)
        self._scope = outer

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.modules.setdefault(alias.name.split(".")[0], self._origin(node))
        self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module or node.level:
            self.modules.setdefault("." if node.level else str(node.module).split(".")[0], self._origin(node))
        self.generic_visit(node)

    def visit_alias(self, node: ast.alias) -> None:
        self.used.setdefault(node.asname or node.name, self._origin(node))

    def visit_Name(self, node: ast.Name) -> None:
        self.used.setdefault(node.id, self._origin(node))
        if isinstance(node.ctx, ast.Load):
            self.read_names.add(node.id)

    def visit_Constant(self, node: ast.Constant) -> None:
        if node.value == "cuda:0" and self.pinned_device is None:
            self.pinned_device = self._origin(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.used.setdefault(node.attr, self._origin(node))
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            known, value = _value(node.value, self._constants)
            if known:
                self._constants[node.targets[0].id] = value
            if isinstance(node.value, ast.Call) and callee(node.value.func)[0] == "LoraConfig":
                self.lora_variables[node.targets[0].id] = self._origin(node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name, owner = callee(node.func)
        if not owner:
            self.invoked.setdefault(name, (self._scope, node.lineno))
        if name == "add_argument":
            self._argparse(node)
        elif name in _READ:
            positional, keywords = tuple(self._positional(node)), dict(self._keywords(node))
            self.calls.append(
                Call(name, owner, self._origin(node), positional, keywords, dict(_references(node)), _names(node), self._scope, self._guard)
            )
        self.generic_visit(node)

    def _origin(self, node: ast.AST) -> Origin:
        return Origin(self.name, str(getattr(node, "lineno", 0)))

    def _positional(self, node: ast.Call) -> Iterator[Any]:
        for argument in node.args:
            yield _value(argument, self._constants)[1]

    def _keywords(self, node: ast.Call) -> Iterator[tuple[str, Setting]]:
        for keyword in node.keywords:
            if keyword.arg in _CLASS_LISTS and isinstance(keyword.value, (ast.Set, ast.List, ast.Tuple)):
                yield keyword.arg, Setting(tuple(callee(element)[0] for element in keyword.value.elts), self._origin(keyword.value))
                continue
            known, value = _value(keyword.value, self._constants)
            if keyword.arg is not None and known:
                yield keyword.arg, Setting(value, self._origin(keyword.value))

    def _argparse(self, node: ast.Call) -> None:
        """add_argument("--x", default=8): what the script uses when the flag is not given."""
        flags = [value for known, value in (_value(argument, {}) for argument in node.args) if known and isinstance(value, str)]
        default = next((keyword.value for keyword in node.keywords if keyword.arg == "default"), None)
        known, value = _value(default, self._constants) if default is not None else (False, None)
        self.declared |= {flag.lstrip("-").replace("-", "_") for flag in flags}
        for flag in flags:
            if flag.startswith("--") and known and value is not None:
                self.defaults[flag[2:].replace("-", "_")] = Setting(value, self._origin(node))


def _names(node: ast.Call) -> frozenset[str]:
    return frozenset(k.arg or "**" for k in node.keywords if not (isinstance(k.value, ast.Constant) and k.value.value is None))


def _references(node: ast.Call) -> Iterator[tuple[str, str]]:
    """Arguments of the form args.name: (keyword or position, name)."""
    for at, argument in enumerate(node.args):
        if isinstance(argument, ast.Attribute) and isinstance(argument.value, ast.Name):
            yield str(at), argument.attr
    for keyword in node.keywords:
        if keyword.arg and isinstance(keyword.value, ast.Attribute) and isinstance(keyword.value.value, ast.Name):
            yield keyword.arg, keyword.value.attr


def _value(node: ast.expr, constants: Mapping[str, Any]) -> tuple[bool, Any]:
    """(known, value) of a literal, a module constant, torch.bfloat16, a member of FSDP's enums, or CPUOffload(...)."""
    if isinstance(node, ast.Attribute) and (node.attr in _DTYPES or callee(node.value)[0] in _ENUMS):
        return True, node.attr
    if isinstance(node, ast.Call) and callee(node.func)[0] == "CPUOffloadPolicy":
        return True, True
    if isinstance(node, ast.Call) and callee(node.func)[0] == "CPUOffload":  # CPUOffload(offload_params=True)
        return _value(node.keywords[0].value if node.keywords else node.args[0], constants) if node.keywords or node.args else (True, False)
    if isinstance(node, ast.Name):
        return node.id in constants, constants.get(node.id)
    try:
        return True, ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError):
        return False, None
