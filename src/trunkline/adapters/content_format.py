"""Whether a chat template goes through a message's content by itself, as vLLM makes it out.

An engine gives contents as one text to a template that does not, and as a list of parts to one that
does, also where the client sent one text. It looks at loops alone: over `content`, over the content
of an item of `messages`, or over what a macro was handed as such. Where it errs, so must we. Read
`template.py` next.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes


def takes_parts(tree: nodes.Template) -> bool:
    """Whether some loop of the template is over the parts of a content."""
    items = _message_names(tree)
    in_macros: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        handed = _handed_content(tree, macro, items)
        in_macros |= {id(loop): handed for loop in macro.find_all(nodes.For)}
    for loop in tree.find_all(nodes.For):
        if any(_is_of(loop.iter, item, "content") for item in items):
            return True
        if isinstance(loop.iter, nodes.Name) and loop.iter.name in in_macros.get(
            id(loop), {"content"}
        ):
            return True
    return False


def _message_names(tree: nodes.Template) -> list[str]:
    """What an item of `messages`, or of a variable that was set to it, is called in loops."""
    lists = list(_names_of_messages(tree))
    return [
        loop.target.name
        for loop in tree.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and any(_is_of(loop.iter, one) for one in lists)
    ]


def _names_of_messages(tree: nodes.Template) -> Iterator[str]:
    known = ["messages"]
    for name in known:  # it grows while it is gone through
        yield name
        for assign in tree.find_all(nodes.Assign):
            target = assign.target
            is_new = isinstance(target, nodes.Name) and target.name not in known
            if is_new and isinstance(target, nodes.Name) and _is_of(assign.node, name):
                known.append(target.name)


def _handed_content(tree: nodes.Template, macro: nodes.Macro, items: list[str]) -> set[str]:
    """Parameters of a macro that some call hands the content of a message."""
    names = [argument.name for argument in macro.args]
    handed: set[str] = set()
    for call in tree.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        given = [*zip(names, call.args, strict=False)]
        given += [(one.key, one.value) for one in call.kwargs if one.key in names]
        handed |= {
            name for name, value in given if any(_is_of(value, item, "content") for item in items)
        }
    return handed


def _is_of(node: nodes.Node, variable: str, key: str | None = None) -> bool:
    """Whether it is the variable (or `variable.key`), filtered, tested or cut as may be."""
    if isinstance(node, nodes.Filter):
        return node.node is not None and _is_of(node.node, variable, key)
    if isinstance(node, nodes.Test):
        return _is_of(node.node, variable, key)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _is_of(node.node, variable, key)
    if key is None:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == variable
    if isinstance(node, nodes.Getitem):
        is_key = isinstance(node.arg, nodes.Const) and node.arg.value == key
        return is_key and _is_variable(node.node, variable)
    return (
        isinstance(node, nodes.Getattr) and node.attr == key and _is_variable(node.node, variable)
    )


def _is_variable(node: nodes.Node, variable: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == variable
