"""Hostile configurations: YAML that attacks its reader, values, names, paths, and import paths."""

from __future__ import annotations

from hostile.case import BASE, CONFIG, Case, bound_socket, config, device, fifo, link, sparse

__all__ = ["CASES"]

_BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
_MERGES = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 40)}]}}\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
_CODE = "import pathlib\npathlib.Path('../canary-ran').touch()\n"


def _with(line: str) -> str:
    """Append a line to the base configuration, on line 9."""
    return BASE + line + "\n"


def _stage(text: str) -> str:
    return BASE + f"  {text}\n"


def _change(old: str, new: str) -> str:
    assert old in BASE
    return BASE.replace(old, new)


_YAML = [
    # -- tags
    config(
        "name: !!python/object/apply:os.system ['touch ../canary-ran']\n",
        ":1: contains the tag",
        "tag os.system",
    ),
    config(
        "name: !!python/object/new:subprocess.Popen [[touch, ../canary-ran]]\n",
        ":1: contains the tag",
        "tag popen",
    ),
    config("a: 1\nname: !!python/name:os.system ''\n", ":2: contains the tag", "tag python name"),
    config("name: !!python/module:canary_module ''\n", ":1: contains the tag", "tag python module"),
    config("!!python/object/apply:eval ['1']\n", ":1: contains the tag", "tag on the document"),
    config("name: !<tag:yaml.org,2002:python/tuple> [1]\n", ":1: contains the tag", "verbatim tag"),
    config(
        "%TAG ! tag:yaml.org,2002:python/\n---\nname: !name:os.system x\n",
        ":3: contains the tag",
        "tag directive",
    ),
    config("name: !!binary aGVsbG8=\n", ":1: contains the tag", "tag binary"),
    config("name: !ENV ${HOME}\n", ":1: contains the tag", "tag env"),
    config("name: !include /etc/passwd\n", ":1: contains the tag", "tag include"),
    # -- aliases
    config(_BOMB, "expands to more than", "billion laughs"),
    config(_MERGES, "expands to more than", "merge bomb"),
    config("a: &a [*a]\n", "alias refers to the block that contains it", "alias to itself"),
    config(
        "a: &a {b: &b {c: *a}}\n",
        "alias refers to the block that contains it",
        "alias to its grandparent",
    ),
    config("a: &a\n  <<: *a\n", "alias refers to the block that contains it", "merge of itself"),
    config("name: *nobody\n", ":1: is not valid YAML", "undefined alias"),
    config("<<: [1, 2]\n", ":1: '<<' merges blocks", "merge of numbers"),
    config("<<: text\nname: x\n", ":1: '<<' merges blocks", "merge of text"),
    # -- nesting and size
    config("a: " + "[" * 5000 + "]" * 5000, "nests deeper than 32", "5000 brackets"),
    config("a: " + "{b: " * 2000 + "1" + "}" * 2000, "nests deeper than 32", "2000 braces"),
    config("[" * 100_000, "nests deeper than 32", "100000 open brackets"),
    config("- " * 50_000, "nests deeper than 32", "50000 dashes"),
    config("? " * 50_000, "nests deeper than 32", "50000 complex keys"),
    config(
        "".join(" " * n + f"a{n}:\n" for n in range(200)),
        "nests deeper than 32",
        "200 indented blocks",
    ),
    config("&a " * 20_000 + "x", "is not valid YAML", "20000 anchors"),
    config("a" * 300_000, "larger than 256 KiB", "long scalar"),
    config(sparse(5 * 2**30), "larger than 256 KiB", "5 GiB of zeros"),
    config("".join(f"k{n}: 1\n" for n in range(19_000)), "more than 10000 values", "19000 keys"),
    config(
        "".join(f"k{n}: 1\n" for n in range(4_000)),
        ("unknown key", "and more; 4002 values"),
        "4000 unknown keys",
    ),
    config(BASE + "x: [" + "1.5," * 4_000 + "1]\n", ":9: x: unknown key", "4000 items"),
    config("a: [" + "1," * 100_000 + "1]\n", "more than 10000 values", "100000 items"),
    config("a: [" + "~," * 100_000 + "1]\n", "more than 10000 values", "100000 nulls"),
    config(
        BASE.replace("hostile", "'" + "x\n\n" * 60_000 + "'"),
        "1 to 64 of letters",
        "name of 60000 lines",
    ),
    # -- bytes and characters
    config(b"name: \xff\xfe\n", ":1: byte 0xff", "no UTF-8"),
    config(b"a: 1\nname: caf\xe9\n", ":2: byte 0xe9", "Latin-1"),
    config(b"name: \xc0\xaf\n", ":1: byte 0xc0", "overlong slash"),
    config(b"name: \xed\xa0\x80\n", ":1: byte 0xed", "surrogate in UTF-8"),
    config(b"name: \xf4\x90\x80\x80\n", ":1: byte 0xf4", "beyond U+10FFFF"),
    config(BASE.encode("utf-16"), "is UTF-16", "UTF-16"),
    config(BASE.encode("utf-32"), "is UTF-16", "UTF-32"),
    config(b"\x00\x00\xfe\xff" + BASE.encode("utf-32-be"), "not UTF-8", "UTF-32 big endian"),
    config(b"\xef\xbb\xbf\xef\xbb\xbfname: 1\n", ":1: name: found 1", "two byte order marks"),
    config("name: x\0y\n", ":1: character U+0000", "NUL"),
    config("a: 1\nb: \x1b[2J\n", ":2: character U+001B", "escape sequence"),
    config("name: \x7f\n", ":1: character U+007F", "DEL"),
    config('name: "a\\0b"\n', ":1", "escaped NUL"),
    config('name: "\\ud800"\n', "U+D800", "escaped surrogate"),
    config('"\\udfff": 1\nname: x\n', "U+DFFF", "surrogate in a key"),
    config('name: "\\U00110000"\n', "is not valid YAML", "escape beyond Unicode"),
    config('name: "\\xZZ"\n', "is not valid YAML", "broken escape"),
    config("name:\tx\n\tb: 1\n", "is not valid YAML", "tabs"),
    config("name: x\rstages: {}\r", "stages", "carriage returns"),
    # -- shape
    config("", "is empty", "empty file"),
    config("---\n...\n", "is empty", "empty document"),
    config("- a\n- b\n", "contains a list", "a list"),
    config("42\n", "contains a single value", "a number"),
    config("null\n", "is empty", "null"),
    config("name: a\n---\nname: b\n", ":2: a second document", "two documents"),
    config("name: [unclosed\n", "is not valid YAML", "open bracket"),
    config("name: 'unclosed\n", "is not valid YAML", "open quote"),
    config("name: x: y: z\n", "is not valid YAML", "colons"),
    config("[a, b]: 1\n", ":1: a key must be text", "a list as key"),
    config("{a: 1}: 1\n", ":1: a key must be text", "a block as key"),
    config("? |\n  block\n: 1\n", "unknown key", "a block text as key"),
    config(
        "<?xml version='1.0'?>\n<!DOCTYPE x [<!ENTITY e SYSTEM 'file:///etc/passwd'>]>\n",
        "config.yaml",
        "XML",
    ),
    config(b"\x80\x04\x95\x1e\x00\x00\x00c__builtin__\nexec\n", "not UTF-8", "a pickle"),
    config(b"PK\x03\x04" + b"\0" * 100, "U+0003", "a zip"),
    config(b"\x1f\x8b\x08" + b"\0" * 100, "not UTF-8", "gzip"),
]

_KEYS = [
    config(BASE + BASE, "the key occurs twice", "every key twice"),
    config(
        _with("seed: 1\nseed: 2"), (":10:", "the key occurs twice, first on line 9"), "seed twice"
    ),
    config(
        _change("preset: nano", "preset: nano, preset: nano"),
        ":4: model.preset: the key occurs twice",
        "twice",
    ),
    config(_with("sead: 1"), (":9: sead", "unknown key", "seed"), "misspelt key"),
    config(_with("__class__: x"), ":9: __class__", "dunder key"),
    config(_with("'': x"), ":9:", "empty key"),
    config(_with("'a.b': x"), ":9:", "key with a dot"),
    config(_with(f"{'k' * 1000}: 1"), ":9:", "key of 1000 letters"),
    config(_with('"\\e[31m": 1'), ":9:", "escape sequence in a key"),
    config(_stage("polcy: {}"), "stages.polcy", "misspelt stage"),
    config(_stage("__init__: {}"), "stages.__init__", "dunder stage"),
    config(_with("stages: 5"), "stages", "stages twice, one a number"),
    config("name: x\nstages: 5\n", ":2: stages", "stages is a number"),
    config("name: x\nstages: [sft]\n", ":2: stages", "stages is a list"),
    config("name: x\nstages: {}\n", "stages", "no stage"),
    config("name: x\nstages:\n", "stages", "stages null"),
    config("stages: {sft: {}}\n", "name", "no name"),
    config("name: x\n", "stages", "name alone"),
    config(
        _change("model: {preset: nano,", "model: {path: [nano],"), "model.path", "path is a list"
    ),
    config(
        _change("max_steps: 2", "max_steps: {a: 1}"),
        ":8: stages.sft.max_steps",
        "steps are a block",
    ),
    config(_change("{max_steps: 2}", "nothing"), ":8: stages.sft", "stage is text"),
]


def _number(value: str, name: str) -> Case:
    return config(
        _change("max_steps: 2", f"max_steps: {value}"), ":8: stages.sft.max_steps", f"steps {name}"
    )


def _rate(value: str, name: str) -> Case:
    return config(
        _change("max_steps: 2", f"learning_rate: {value}"),
        ":8: stages.sft.learning_rate",
        f"rate {name}",
    )


_NUMBERS = [
    _number(".nan", "NaN"),
    _number(".inf", "infinite"),
    _number("-1", "negative"),
    _number("0", "zero"),
    _number("1.5", "a fraction"),
    _number("1e400", "1e400"),
    _number("9" * 40, "of 40 digits"),
    _number("9" * 5000, "of 5000 digits"),
    _number("0x" + "f" * 40, "hexadecimal, long"),
    _number("0x" + "f" * 40_000, "hexadecimal, 40000 digits"),
    _number("true", "true"),
    _number("'2'", "quoted"),
    _number("1_000", "with underscore"),
    _number("190:20:30", "sexagesimal"),
    _number("٣", "Arabic digit"),
    _rate(".nan", "NaN"),
    _rate("-.inf", "minus infinity"),
    _rate("1e999999999", "1e999999999"),
    _rate("1e-999999999", "1e-999999999"),
    _rate("-1e-3", "negative"),
    _rate("1" * 400, "of 400 digits"),
    config(_with("seed: 99999999999999999999"), ":9: seed", "seed above 64 bits"),
    config(_with("seed: -1"), ":9: seed", "negative seed"),
    config(_with("seed: .nan"), ":9: seed", "seed NaN"),
    config(_change("vocab_size: 320", "vocab_size: 1000000000"), "vocab_size", "vocabulary of 1e9"),
    config(_change("context: 128", "context: 1000000000000"), "context", "context of 1e12"),
    config(_change("threads: 1", "threads: 1000000"), ":2: threads", "a million threads"),
    config(_change("threads: 1", "threads: [1]"), ":2: threads", "threads in a list"),
    config(
        _change("num_demonstrations: 50", "num_demonstrations: 1000000000000"),
        "num_demonstrations",
        "1e12 rows",
    ),
    config(
        _stage(
            "policy: {iterations: 1, prompts_per_iteration: 1000000000, group_size: 1000000000}"
        ),
        "stages.policy",
        "groups of 1e9",
    ),
    config(
        _stage("evaluate: {episodes: 1000000000000}"), "stages.evaluate.episodes", "1e12 episodes"
    ),
    config(
        _stage("policy: {sampling: {temperature: 1e400}}"), "temperature", "temperature infinite"
    ),
    config(
        _stage("policy: {sampling: {max_completion_tokens: 1000000000000}}"),
        "max_completion_tokens",
        "1e12 tokens",
    ),
    config(
        _stage("policy: {sampling: {stop: [" + "a, " * 5000 + "b]}}"), "stop", "5001 stop texts"
    ),
    config(_with("run: {timeout_minutes: -5}"), "run.timeout_minutes", "negative timeout"),
]


def _name(value: str, name: str, says: str = ":1: name") -> Case:
    return config(_change("name: hostile", f"name: {value}"), says, f"name {name}")


_NAMES = [
    _name("../escape", "with dots and slash"),
    _name("..", "dots"),
    _name(".", "dot"),
    _name("/etc", "absolute"),
    _name("a/b", "with slash"),
    _name("'a\\b'", "with backslash"),
    _name(".hidden", "hidden"),
    _name("-rf", "an option"),
    _name("mlflow", "of MLflow's folder"),
    _name("prefect", "of Prefect's folder"),
    _name("MLflow", "of MLflow's folder in capitals"),
    _name("logs", "logs"),
    _name("operations", "operations"),
    _name("~root", "tilde"),
    _name("'a b'", "with blank"),
    _name('"a\\nb"', "with line break"),
    _name("'$(touch ../canary-ran)'", "shell"),
    _name("a..b", "with two dots"),
    _name("''", "empty"),
    _name("5", "a number"),
    _name("x" * 65, "of 65 letters"),
    _name("\uff4e\uff41", "full width"),
    _name("'a\\u202eb'", "with backslash u"),
    _name("con:aux", "with colon"),
    config(
        _with("tracking: {registered_model: '../x'}"), "tracking", "registered model with slash"
    ),
    config(
        _change("{traces: 0,", "{registered_model: 'a/b',"),
        "registered_model",
        "model name with slash",
    ),
    config(
        _change("{traces: 0,", '{experiment: "a\\nb",'), "experiment", "experiment with line break"
    ),
    config(_change("{traces: 0,", "{experiment: ' ',"), "experiment", "blank experiment"),
    config(_change("{traces: 0,", "{uri: 'file:///etc',"), "uri", "tracking store file:"),
    config(
        _change("{traces: 0,", "{uri: 'http://me:secret@host',"),
        "contains a password",
        "password in the store",
    ),
    config(
        _change("{traces: 0,", "{uri: 'javascript:alert(1)',"), "uri", "tracking store javascript:"
    ),
    config(_change("{traces: 0,", "{uri: 'http://[bad',"), "uri", "tracking store broken address"),
    config(_change("levels: [easy]", "levels: ['../easy']"), "levels", "level with slash"),
    config(_change("levels: [easy]", "levels: ['easy', 5]"), "levels", "level a number"),
    config(_change("levels: [easy]", "levels: easy"), "levels", "levels a text"),
    config(
        _stage("policy: {curriculum: [{name: a, levels: {'../../x': 1}}]}"),
        "levels",
        "level in a curriculum",
    ),
    config(
        _stage("policy: {curriculum: [{name: a, levels: {easy: .nan}}]}"),
        "levels",
        "level weight NaN",
    ),
]

_CODE_FILES = {"canary_module.py": _CODE, "canary_package/__init__.py": _CODE}


def _code(text: str, says: str | tuple[str, ...], name: str) -> Case:
    parts = (says,) if isinstance(says, str) else says
    return Case(name, ("validate", CONFIG), (CONFIG, *parts), {CONFIG: text, **_CODE_FILES})


def _imported(text: str, says: tuple[str, ...], name: str) -> Case:
    return Case(
        name, ("validate", CONFIG, "--import-code"), (CONFIG, *says), {CONFIG: text, **_CODE_FILES}
    )


def _passed(text: str, name: str) -> Case:
    """Build a case with code that `validate` finds but does not run."""
    return Case(
        f"code that is found: {name}",
        ("validate", CONFIG),
        ("found, not imported",),
        {CONFIG: text, **_CODE_FILES},
        code=0,
    )


_ENVIRONMENT = "{name: pixel_grid}"
_IMPORTS = [
    _imported(
        _change(_ENVIRONMENT, "{name: 'os:system'}"),
        (":3: environment.name", "subclass"),
        "environment os:system",
    ),
    _passed(_change(_ENVIRONMENT, "{name: 'canary_module:X'}"), "environment"),
    _passed(_change(_ENVIRONMENT, "{name: 'canary_package:X'}"), "package"),
    _passed(_stage("policy: {rewards: {'canary_module:f': 1.0}}"), "reward"),
    _code(
        _change(_ENVIRONMENT, "{name: '../canary_module:X'}"),
        "environment.name",
        "environment by path",
    ),
    _code(
        _change(_ENVIRONMENT, "{name: 'canary_module'}"),
        "environment.name",
        "environment without class",
    ),
    _code(
        _change(_ENVIRONMENT, "{name: 'canary_module:'}"),
        "environment.name",
        "environment with empty class",
    ),
    _code(
        _change(_ENVIRONMENT, "{name: ':X'}"), "environment.name", "environment with empty module"
    ),
    _code(
        _change(_ENVIRONMENT, "{name: 'a b:c d'}"), "environment.name", "environment with blanks"
    ),
    _code(
        _change(_ENVIRONMENT, "{name: '__import__(\"os\"):x'}"),
        "environment.name",
        "environment an expression",
    ),
    _code(
        _change(_ENVIRONMENT, "{name: 'nowhere.at.all:X'}"),
        "nowhere",
        "environment that is not there",
    ),
    _code(_change(_ENVIRONMENT, "{name: 'pixelgrid'}"), "pixel_grid", "misspelt environment"),
    _code(
        _change(_ENVIRONMENT, "{name: pixel_grid, options: {x: 1}}"),
        "environment",
        "unknown option",
    ),
    _code(
        _change(_ENVIRONMENT, "{name: pixel_grid, options: {__class__: 1}}"),
        "environment",
        "dunder option",
    ),
    _imported(
        _change(
            _ENVIRONMENT,
            "{name: gymnasium, options: {id: 'os:system', command: 'touch ../canary-ran'}}",
        ),
        ("environment",),
        "gymnasium os:system",
    ),
    _passed(
        _change(_ENVIRONMENT, "{name: gymnasium, options: {id: 'canary_module:X'}}"), "gymnasium"
    ),
    _code(
        _change(_ENVIRONMENT, "{name: verifiers, options: {taskset: 'canary_module:X'}}"),
        "environment",
        "taskset",
    ),
    _imported(
        _stage("policy: {rewards: {'os:nothing': 1.0}}"),
        ("rewards",),
        "reward that its module lacks",
    ),
    _code(_stage("policy: {rewards: {'os:system(1)': 1.0}}"), "rewards", "reward a call"),
    _code(
        _stage("policy: {rewards: {'canary_module': 1.0}}"), "rewards", "reward without function"
    ),
    _code(
        _stage("policy: {rewards: {'canary_module.py:f': x}}"), "rewards", "reward weight is text"
    ),
    _code(_stage("policy: {rewards: {'nowhere:f': 1.0}}"), "nowhere", "reward that is not there"),
    _code(_stage("policy: {rewards: {task: .nan}}"), "rewards", "reward weight NaN"),
    _code(_stage("policy: {rewards: {'../x:f': 1.0}}"), "rewards", "reward by path"),
    _code(_stage("policy: {rewards: [task]}"), "rewards", "rewards in a list"),
]

_OTHER = "stages: {prepare_data: {demonstrations: %s}, sft: {max_steps: 2}}\n"
_PLACES = [
    Case(
        "config is a pipe", ("validate", CONFIG), (CONFIG, "is not a regular file"), {CONFIG: fifo}
    ),
    Case("config is a socket", ("validate", CONFIG), (CONFIG,), {CONFIG: bound_socket}),
    Case(
        "config is /dev/zero",
        ("validate", CONFIG),
        (CONFIG, "is not a regular file"),
        {CONFIG: device("zero")},
    ),
    Case("config is /dev/stdin", ("validate", "/dev/stdin"), ("/dev/stdin",)),
    Case("config is a folder", ("validate", "."), ("is a folder",)),
    Case(
        "config is a broken link",
        ("validate", CONFIG),
        (CONFIG, "no such file"),
        {CONFIG: link("nowhere")},
    ),
    Case("config links to itself", ("validate", CONFIG), (CONFIG,), {CONFIG: link(CONFIG)}),
    Case("config is not there", ("validate", "nowhere.yaml"), ("nowhere.yaml: no such file",)),
    Case("config with a long name", ("validate", "x" * 5000), ("File name too long",)),
    Case("config with a NUL in its name", ("validate", "a\0b.yaml"), ("b.yaml'",)),
    Case("config with a surrogate in its name", ("validate", "a\udcff.yaml"), ("no such file",)),
    Case("config with a line break in its name", ("validate", "a\nb.yaml"), ("no such file",)),
    Case(
        "config links to the password file",
        ("validate", CONFIG),
        (CONFIG,),
        {CONFIG: link("/etc/passwd")},
    ),
    Case(
        "config is the memory of the process", ("validate", "/proc/self/mem"), ("/proc/self/mem",)
    ),
    config(_with("output: /dev/null"), ":9: output", "output is a device"),
    config(_with("output: /proc/self/fd/0/x"), ":9: output", "output below a file"),
    config(_with('output: "a\\0b"'), ":9: output", "output with a NUL"),
    config(_with(f"output: {'x' * 5000}"), ":9: output", "output with a long name"),
    config(_with("output: config.yaml"), ":9: output", "output is the config"),
    config(_with("output: /proc/1/root/x"), ":9: output", "output in proc"),
    config(_change("preset: nano", "path: '/etc/passwd'"), ":4: model.path", "model is a file"),
    config(
        _change("preset: nano", "path: '../../../../etc'"),
        ":4: model.path",
        "model is a folder without config",
    ),
    config(
        _change("preset: nano", "path: 'models:/../x@y'"),
        ":4: model.path",
        "registered model with dots",
    ),
    config(
        _change("preset: nano", "path: 'models:/a/../../b'"),
        ":4: model.path",
        "registered version with dots",
    ),
    config(
        _change("preset: nano", "path: 'http://host/model'"), ":4: model.path", "model by address"
    ),
    config(
        _change("preset: nano", "path: 'file:///etc'"), ":4: model.path", "model by file address"
    ),
    config(
        _change("preset: nano", "path: '~nobody_here/x'"),
        ":4: model.path",
        "model in a home that is not there",
    ),
    config(_change("preset: nano", 'path: "a\\0b"'), "model.path", "model with a NUL"),
    config(_change("preset: nano", "preset: ../nano"), ":4: model.preset", "preset with dots"),
    config(
        _change("preset: nano", "preset: nano, chat_template: /etc"),
        "chat_template",
        "template is a folder",
    ),
    config(
        _change("preset: nano", "preset: nano, chat_template: t.jinja"),
        "chat_template",
        "template is a pipe",
        **{"t.jinja": fifo},
    ),
    config(
        _change("preset: nano", "preset: nano, chat_template: t.jinja"),
        "chat_template",
        "template is /dev/zero",
        **{"t.jinja": device("zero")},
    ),
    *(
        config(
            _change("preset: nano", f"{model}, chat_template: t.jinja"),
            ("model.chat_template", says),
            f"template: {name}, {model}",
            **{"t.jinja": text},
        )
        for name, text, says in (
            ("no Jinja", "{% for message in messages %}{{", "chat template refuses"),
            ("an error", "{{ raise_exception('no') }}", "refuses this conversation (user): no"),
        )
        for model in ("preset: nano", "path: nobody/model")
    ),
    config(
        _change("preset: nano", "preset: nano, chat_template: t.jinja"),
        ("model.chat_template", "omits user messages"),
        "template without messages",
        **{"t.jinja": "Hello"},
    ),
    config(
        _change("preset: nano", "preset: nano, chat_template: t.jinja"),
        ("model.chat_template", "omits assistant messages"),
        "template of users",
        **{"t.jinja": "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"},
    ),
    config(
        _change("preset: nano", "preset: nano, chat_template_date: 9999-99-99"),
        "date",
        "date of no calendar",
    ),
]


def _override(value: str, says: str, name: str) -> Case:
    return Case(f"--set {name}", ("validate", CONFIG, "--set", value), (says,), {CONFIG: BASE})


_OVERRIDES = [
    _override("seed", "seed", "without value"),
    _override("=1", "--set", "without key"),
    _override("seed=!!python/object/apply:os.system ['touch ../canary-ran']", "tag", "tag"),
    _override("seed=" + "[" * 5000, "seed", "brackets"),
    _override("seed=.nan", "seed", "NaN"),
    _override("seed=" + "9" * 5000, "seed", "5000 digits"),
    _override("__class__.__init__=1", "__class__", "dunder"),
    _override("stages.sft.max_steps.x.y.z=1", "max_steps", "below a number"),
    _override("a" + ".a" * 2000 + "=1", "a.a", "2000 keys deep"),
    _override("name=../x", "name", "name"),
    _override("seed=\ud800", "--set", "surrogate"),
    _override("seed: 1", "seed: 1", "with a colon"),
    _override("seed=&a [*a]", "seed", "alias to itself"),
    _override("stages=null", "stages", "no stages"),
]

CASES = _YAML + _KEYS + _NUMBERS + _NAMES + _IMPORTS + _PLACES + _OVERRIDES
