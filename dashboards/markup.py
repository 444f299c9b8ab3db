"""Dash components as plain HTML, for pages without a server. Text stays text."""

from __future__ import annotations

from html import escape
from typing import Any

_VOID = {"br", "hr", "img"}
_ATTRIBUTES = {"className": "class", "colSpan": "colspan", "title": "title", "role": "role"}


def to_html(node: Any) -> str:
    """What a component tree shows, with none of what it does: no scripts, no links, no ids."""
    if node is None:
        return ""
    if isinstance(node, list | tuple):
        return "".join(to_html(item) for item in node)
    kind = getattr(node, "_type", None)
    if kind is None:
        return escape(str(node), quote=False)
    if kind == "Button":  # only a server could answer it
        return ""
    inner = to_html(getattr(node, "children", None))
    if kind == "Tooltip":
        return f'<span title="{escape(str(node.label))}">{inner}</span>' if inner else ""
    if node._namespace != "dash_html_components":
        return f'<span class="{kind.lower()}">{inner}</span>'
    tag = kind.lower()
    return f"<{tag}{_attributes(node)}>" + ("" if tag in _VOID else f"{inner}</{tag}>")


def _attributes(node: Any) -> str:
    names = [*_ATTRIBUTES, *(name for name in vars(node) if name.startswith("aria-"))]
    pairs = [
        (_ATTRIBUTES.get(name, name), getattr(node, name)) for name in names if hasattr(node, name)
    ]
    return "".join(f' {name}="{escape(str(value))}"' for name, value in pairs if value is not None)
