"""Mutants to try: cosmic-ray's, of a choice of operators and places."""

import ast
import collections
import difflib
import functools
import hashlib
import itertools
import re
from pathlib import Path

from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.commands.init import _operators
from cosmic_ray.mutating import mutate_code

#: One or two replacements each. Others differ more, so any test finds them.
OPERATORS = re.compile(
    "core/("
    "AddNot|ReplaceAndWithOr|ReplaceOrWithAnd|ReplaceTrueWithFalse"
    "|ReplaceFalseWithTrue|NumberReplacer|ZeroIterationForLoop"
    "|ReplaceBreakWithContinue|ReplaceContinueWithBreak|RemoveDecorator"
    "|ExceptionReplacer"
    "|ReplaceUnaryOperator_(Delete_.*|USub_UAdd)"
    "|ReplaceComparisonOperator_(Eq_NotEq|NotEq_Eq|Is_IsNot|IsNot_Is|Lt_LtE"
    "|Lt_GtE|LtE_Lt|LtE_Gt|Gt_GtE|Gt_LtE|GtE_Gt|GtE_Lt|In_NotIn|NotIn_In)"
    "|ReplaceBinaryOperator_(Add_Sub|Sub_Add|Mul_Div|Mul_FloorDiv|Div_Mul"
    "|FloorDiv_Mul|FloorDiv_Div|Mod_FloorDiv|Pow_Mul|BitAnd_BitOr|BitOr_BitAnd"
    "|LShift_RShift|RShift_LShift)"
    ")"
)
#: Decorators that only say something to readers and type checkers.
SAYING = {"override", "overload", "abstractmethod", "final"}


def _outside_behaviour(node):
    """The parts of a statement or definition that no test could miss."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        if node.name in ("__repr__", "__str__"):
            yield node
        yield from (
            d
            for d in node.decorator_list
            if ast.unparse(d).rpartition(".")[2] in SAYING
        )
        if node.returns:
            yield node.returns
    elif (isinstance(node, ast.arg) and node.annotation) or isinstance(
        node, ast.AnnAssign
    ):
        yield node.annotation
    elif isinstance(node, ast.If):
        if ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield node
    elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        # What an error says.
        yield from node.exc.args
    elif isinstance(node, (ast.Assert, ast.JoinedStr)):
        yield node
    elif isinstance(node, ast.keyword) and node.arg == "strict":
        # zip's lengths never differ.
        yield node.value
    elif isinstance(node, ast.Call):
        name = ast.unparse(node.func).rpartition(".")[2]
        if name == "cast" and ast.unparse(node.func) != "tf.cast":
            yield node.args[0]
        elif name in ("TypeVar", "NewType"):
            yield node


def _is_type_alias(node):
    """Whether `X = A | B`, at the top of a module, names types."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.BinOp)
        and isinstance(node.value.op, ast.BitOr)
    )


def _span(node):
    start = (node.lineno, node.col_offset)
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        for decorator in node.decorator_list:
            start = min(start, (decorator.lineno, 0))
    return start, (node.end_lineno, node.end_col_offset)


def _repeats(name, text):
    """Whether another operator has the same mutant.

    `not a == b` is `a != b`, and `not not a` is `a`.
    """
    if name != "core/AddNot":
        return False
    test = ast.parse(f"({text})", mode="eval").body
    return isinstance(test, ast.Compare) or (
        isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    )


def _text(lines, start, end):
    """The source between two positions."""
    lines = lines[start[0] - 1 : end[0]]
    lines[-1] = lines[-1][: end[1]]
    lines[0] = lines[0][start[1] :]
    return "\n".join(lines)


def _compiles(source):
    try:
        compile(source, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        # cosmic-ray takes the stars of `{**a}` for a power.
        return False
    return True


def _filtered_spans(tree):
    spans = [_span(n) for n in tree.body if _is_type_alias(n)]
    for node in ast.walk(tree):
        spans += [_span(n) for n in _outside_behaviour(node)]
    return spans


@functools.cache
def find_mutants(path):
    """The mutants of a module that could matter to a test.

    They are in lists, one for each place in the module.
    """
    source = Path(path).read_text(encoding="utf-8")
    filtered = _filtered_spans(ast.parse(source))
    parsed = get_ast(source)
    lines = source.splitlines()
    places = {}
    for name, _, operator in _operators({}):
        if not OPERATORS.fullmatch(name):
            continue
        positions = (
            position
            for node in ast_nodes(parsed)
            for position in operator.mutation_positions(node)
        )
        for occurrence, (start, end) in enumerate(positions):
            # "@" stands before what ast takes for a decorator.
            inside = (start[0], start[1] + (name == "core/RemoveDecorator"))
            if any(
                (a <= inside and end <= b)
                or (a <= inside < b and name == "core/RemoveDecorator")
                for a, b in filtered
            ):
                continue
            if _repeats(name, _text(lines, start, end)):
                continue
            mutant = {
                "module": str(path),
                "operator": name,
                "occurrence": occurrence,
                "start": start,
                "end": end,
            }
            places.setdefault((start, end), []).append(mutant)
    return [places[place] for place in sorted(places)]


def mutate(source, mutant):
    """A module's source with a mutant in it."""
    operator = plugins.get_operator(mutant["operator"])()
    mutated = mutate_code(source, operator, mutant["occurrence"])
    assert mutated is not None, mutant
    return mutated


def difference(source, mutated):
    """The lines that differ, for people."""
    lines = difflib.ndiff(source.splitlines(), mutated.splitlines())
    return "\n".join(line for line in lines if line[0] in "-+")


def _rank(seed, mutant, lines, seen):
    """A number by chance that a line keeps when it moves to another file."""
    line = lines[mutant["start"][0] - 1].strip()
    key = f"{seed} {line} {mutant['operator']}"
    seen[key] += 1
    return hashlib.sha256(f"{key} {seen[key]}".encode()).digest()


def _draw(path, seed):
    """Mutants of a module in the order of their ranks, one for each place."""
    source = Path(path).read_text(encoding="utf-8")
    lines, seen = source.splitlines(), collections.Counter()
    ranked = []
    for place in find_mutants(path):
        mutants = [(_rank(seed, m, lines, seen), m) for m in place]
        ranked.append(min(mutants, key=lambda pair: pair[0]))
    ranked.sort(key=lambda pair: pair[0])
    for rank, mutant in ranked:
        if _compiles(mutate(source, mutant)):
            yield rank, mutant


def sample(modules, count, seed):
    """Draws about `count` mutants, as many from a module as it has lines.

    At most one for a place, so that operators with many replacements do not
    count for more than others.
    """
    places = {m: len(find_mutants(m)) for m in modules}
    lines = {m: len(Path(m).read_text().splitlines()) for m in modules}
    each = dict.fromkeys(modules, 0)
    while sum(each.values()) < min(count, sum(places.values())):
        # To the one that is furthest behind its share.
        free = [m for m in modules if each[m] < places[m]]
        each[max(free, key=lambda m: lines[m] / (each[m] + 0.5))] += 1
    drawn = []
    for module in modules:
        drawn += itertools.islice(_draw(module, seed), each[module])
    return [mutant for _, mutant in sorted(drawn, key=lambda pair: pair[0])]
