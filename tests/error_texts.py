"""The first words of the library's errors and warnings, on docs/errors.md.

    python tests/error_texts.py

writes the page's lists anew. The words are read from the code: what is raised,
what `ops.checks.message` joins for errors of a step, and what is warned of. A
value in a text is "…".
"""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/errors.md"

#: By the page's lists, the modules and packages with their texts.
LISTS = {
    "arguments": ["configs", "optimizers", "compat/arguments.py"],
    "ids": ["ops"],
    "layers": ["layers", "gradients", "engines", "compat/strategies.py"],
    "keras": ["compat", "kernels"],
    "tables": ["storage"],
    "replicas": ["distribution", "tools/testing/local_cluster.py"],
    "checkpoints": ["checkpoint", "compat/files.py"],
    "conversion": [
        *("tools/conversion", "tools/command_line.py"),
        *("compat/hdf5.py", "compat/strict_json.py"),
    ],
    "serving": ["serving"],
    "tpus": ["sparsecore", "tools/tpu_check", "tools/testing"],
    "measuring": ["tools/planner", "tools/monitoring", "tools/report"],
    "input": ["tools/data.py", "tools/streams.py", "compat/arrow.py"],
}
_LONGEST = 76
#: Functions that tell users of something, and those that join a text's parts.
_TELLS = ("Error", "warn", ".warning", "Assert", "refuse_to_train")
_JOINS = ("message", "require", "tf.strings.join")


def list_of(path):
    """The page's list for a module's path in the package."""
    found = [
        (len(place), name)
        for name, places in LISTS.items()
        for place in places
        if path == place or path.startswith(f"{place}/")
    ]
    return max(found)[1]


def begin(name):
    return f"<!-- {name}: begin -->\n"


def lists():
    """The first words of all texts, sorted, by the page's lists."""
    found = {name: set() for name in LISTS}
    package = ROOT / "tfrs_embed"
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        words = {first_words(text) for text in _texts_of(tree, {})} - {""}
        if words:
            found[list_of(path.relative_to(package).as_posix())] |= words
    return {name: sorted(words, key=str.lower) for name, words in found.items()}


def first_words(text):
    """The words that a text begins with; "": it has no words of its own."""
    text = re.sub(r"%[sdrg]", "…", " ".join(text.split()))
    text = re.sub(r"…(\S*…)+", "…", text)
    text = re.sub(r"^(['(]*…['):.,]*\s+|[\s:.]+)+(?=\w)", "", text)
    if len(re.findall(r"[a-z]{2,}", text)) < 3:
        return ""
    if len(text) > _LONGEST:
        text = text[:_LONGEST].rsplit(" ", 1)[0].rstrip(" .,:;…") + " ..."
    return text


def _texts_of(node, names):
    """The texts that code raises or warns of; `names` are its variables'."""
    if isinstance(node, ast.FunctionDef):
        names = {
            target.id: each.value
            for each in ast.walk(node)
            if isinstance(each, ast.Assign)
            for target in each.targets
            if isinstance(target, ast.Name)
        }
    raised = isinstance(node, ast.Raise)
    call = node.exc if raised else node
    if isinstance(call, ast.Call):
        name = ast.unparse(call.func)
        if name in _JOINS:
            yield from _values(call, names)
        elif raised or name.endswith(_TELLS):
            for argument in call.args:
                # One text, after TensorFlow's two arguments or an errno.
                texts = _values(argument, names)
                if any(re.search(r"[a-z]{2,} ", text) for text in texts):
                    yield from texts
                    break
    for child in ast.iter_child_nodes(node):
        yield from _texts_of(child, names)


def _values(node, names):
    """The texts that an expression may have; none: they aren't known."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.IfExp):
        return [*_values(node.body, names), *_values(node.orelse, names)]
    if isinstance(node, ast.Name) and node.id in names:
        others = {name: v for name, v in names.items() if name != node.id}
        return _values(names[node.id], others)
    if isinstance(node, ast.Subscript):
        return _values(node.value, names)
    if isinstance(node, ast.ListComp):
        return _values(node.elt, names)
    if isinstance(node, ast.JoinedStr | ast.List):
        parts = node.values if isinstance(node, ast.JoinedStr) else node.elts
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [node.left, node.right]
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in _JOINS:
        parts = node.args
    else:
        return []
    known = [_values(part, names) for part in parts]
    return ["".join(part[0] if part else "…" for part in known)]


def page(text):
    """A page's text with its lists made anew."""
    for name, words in lists().items():
        before, start, rest = text.partition(begin(name))
        _, end, after = rest.partition(f"<!-- {name}: end -->")
        assert start and end, f"{PAGE.name} needs {begin(name)} and its end"
        block = "\n".join(["", "```", *words, "```", "", ""])
        text = before + start + block + end + after
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
