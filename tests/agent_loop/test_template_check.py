"""A chat template is known for what it does to conversations before anything is generated."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_loop.template_check import Finding, Trait, Usage, check_template
from agent_loop.tool_formats import ToolFormat
from tests.agent_loop.chat_models import DEEPSEEK, FAMILIES, QWEN3, QWEN25, make_codec

CODECS = {name: make_codec(family) for name, family in FAMILIES.items()}
TOOLS = Usage(shows=("tool",), calls_tools=True)
ENVIRONMENT = Usage(shows=("user",))
PROGRAM = Usage(shows=("system", "user", "tool"), gives_calls=True)

CALLS = {
    ToolFormat.HERMES: "<tool_call>\n{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n</tool_call>",
    ToolFormat.LLAMA3: "{{ {'name': c.function.name, 'parameters': c.function.arguments} | tojson }}",
    ToolFormat.MISTRAL: "[TOOL_CALLS][{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}]",
    ToolFormat.DEEPSEEK: "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name }}\n```json\n"
    "{{ c.function.arguments | tojson }}\n```<｜tool▁call▁end｜>",
    ToolFormat.PYTHONIC: "[{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %})]",
}
"""A message's `tool_calls` as each format has them."""


def chatml(
    turn: str = "{{ m.content }}", *, before: str = "", roles: str = "True", head: str = "", end: str = "<|im_end|>"
) -> str:
    """A template whose assistant's turns are written by `turn`."""
    return (
        "{% if tools %}{{ tools | tojson }}{% endif %}" + before + "{% for m in messages %}{% if m.role == 'assistant' %}"
        f"<|im_start|>assistant\n{head}{turn}{end}\n{{% elif {roles} %}}<|im_start|>{{{{ m.role }}}}\n{{{{ m.content }}}}"
        f"<|im_end|>\n{{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}<|im_start|>assistant\n{head}{{% endif %}}"
    )


def checked(template: str, usage: Usage) -> list[Finding]:
    return check_template(make_codec(replace(FAMILIES["qwen2.5"], template=template)), usage)


def traits(template: str, usage: Usage) -> list[Trait]:
    return [found.trait for found in checked(template, usage)]


@pytest.mark.parametrize("usage", [TOOLS, ENVIRONMENT, PROGRAM, replace(TOOLS, history="append")])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_shipped_families_work_with_every_loop(name: str, usage: Usage) -> None:
    """B60: what they rewrite is said; nothing of it is an error, and none moves its thinking."""
    found = check_template(CODECS[name], usage)
    assert not [one for one in found if one.is_error or one.trait in (Trait.THINKING_MOVED, Trait.CALL_NOT_READ)]
    if usage.history == "append":
        assert Trait.HISTORY_REWRITTEN not in [one.trait for one in found]


@pytest.mark.parametrize(
    ("name", "usage", "what"),
    [
        ("qwen2.5", TOOLS, ""),
        ("qwen2.5", ENVIRONMENT, ""),
        ("smollm2", ENVIRONMENT, ""),
        ("qwen3", TOOLS, ""),
        ("qwen3", ENVIRONMENT, "turns with thinking (before role user)"),
        ("deepseek", TOOLS, "turns with thinking (before role tool)"),
        ("llama3", ENVIRONMENT, "turns with blanks around them (before role user)"),
        ("gemma", TOOLS, "turns with blanks around them (before role tool)"),
    ],
)
def test_a_history_that_a_template_rewrites_is_named_by_what_is_rewritten(name: str, usage: Usage, what: str) -> None:
    """B59, B60"""
    found = [one for one in check_template(CODECS[name], usage) if one.trait is Trait.HISTORY_REWRITTEN]
    assert [one.found.rpartition(": ")[2] for one in found] == ([what] if what else [])
    assert all("begins a new segment" in one.follows for one in found)


SPLIT = "{% set parts = m.content.split('</think>') %}"
MOVED = [
    SPLIT + "<think>\n</think>{{ parts[0].replace('<think>', '') }}{{ parts[-1] }}",
    SPLIT + "{{ parts[0].replace('<think>', '') }}<think></think>{{ parts[-1] }}",
    "{{ m.content.replace('<think>', '').replace('</think>', '') }}",
    SPLIT + "<think>{{ parts[0].replace('<think>', '') }}{{ parts[-1] }}</think>",
    "{{ m.content.replace('</think>', '') }}",
]


@pytest.mark.parametrize("usage", [TOOLS, ENVIRONMENT, PROGRAM, replace(TOOLS, history="append")])
@pytest.mark.parametrize("turn", MOVED)
def test_thinking_that_a_template_puts_outside_its_block_is_found(turn: str, usage: Usage) -> None:
    """B60"""
    assert Trait.THINKING_MOVED in traits(chatml(turn), usage)


def test_thinking_that_moves_only_in_the_history_is_found() -> None:
    """B60: a training template that is right for the last turn."""
    turn = "{% if loop.last %}{{ m.content }}{% else %}{{ m.content.replace('</think>', '') }}{% endif %}"
    assert set(traits(chatml(turn), TOOLS)) == {Trait.THINKING_MOVED, Trait.HISTORY_REWRITTEN}
    assert traits(chatml("{{ m.content }}"), TOOLS) == []


def test_a_template_that_begins_each_turn_with_thinking_is_asked_with_turns_that_go_on_from_there() -> None:
    """B60: the model's turn holds the end of its thinking and not the beginning."""
    (found,) = checked(chatml("{{ m.content.split('</think>')[-1] }}", head="<think>\n"), ENVIRONMENT)
    assert found.trait is Trait.HISTORY_REWRITTEN
    assert traits(chatml(head="<think>\n"), ENVIRONMENT) == []


@pytest.mark.parametrize("written", sorted(CALLS))
@pytest.mark.parametrize("chosen", sorted(ToolFormat))
def test_a_format_that_does_not_fit_the_template_is_named_with_the_one_that_does(
    written: ToolFormat, chosen: ToolFormat
) -> None:
    """B60: parse(render(x)) = x, or a warning."""
    turn = f"{{{{ m.content }}}}{{% for c in m.tool_calls or [] %}}{CALLS[written]}{{% endfor %}}"
    found = checked(chatml(turn), replace(TOOLS, tool_format=chosen))
    if written is chosen:
        assert found == []
        return
    (one,) = found
    assert one.trait is Trait.CALL_NOT_READ
    assert not one.is_error
    assert one.found == f"tools.format is {chosen}, and the chat template writes calls as {written}"
    assert f"set tools.format={written}" in one.follows


def test_auto_that_does_not_find_the_templates_format_is_told() -> None:
    turn = f"{{{{ m.content }}}}{{% for c in m.tool_calls or [] %}}{CALLS[ToolFormat.PYTHONIC]}{{% endfor %}}"
    (found,) = checked(chatml(turn), TOOLS)
    assert found.found == "tools.format is hermes (auto), and the chat template writes calls as pythonic"


def test_calls_in_a_form_that_nobody_reads_are_quoted() -> None:
    turn = "{{ m.content }}{% for c in m.tool_calls or [] %}call {{ c.function.name }} please{% endfor %}"
    (found,) = checked(chatml(turn), TOOLS)
    assert "writes calls as 'call look_up please'" in found.found


def test_a_template_that_writes_no_calls_is_judged_by_its_signs() -> None:
    (found,) = check_template(CODECS["qwen2.5"], replace(TOOLS, tool_format=ToolFormat.MISTRAL))
    assert found.found == "tools.format is mistral, and the chat template writes calls as hermes"


REFUSING = (
    "{{% for m in messages %}}{{% if m.role == '{role}' %}}{{{{ raise_exception('no {role} here') }}}}{{% endif %}}"
    "{{% endfor %}}"
)


def test_a_template_without_the_role_tool_is_an_error_where_tools_are_called_and_a_warning_elsewhere() -> None:
    """B60"""
    template = chatml(before=REFUSING.format(role="tool"))
    (found,) = [one for one in checked(template, TOOLS) if one.is_error]
    assert found.trait is Trait.ROLE_REFUSED
    assert "refuses messages of role tool (TemplateError: no tool here)" in str(found)
    assert not any(one.is_error for one in checked(template, PROGRAM))
    assert Trait.ROLE_REFUSED in traits(template, PROGRAM)
    assert checked(template, ENVIRONMENT) == []


def test_a_template_that_leaves_tools_answers_out_is_an_error() -> None:
    """The model would never see what its tools return."""
    (found,) = [one for one in checked(chatml(roles="m.role != 'tool'"), TOOLS) if one.is_error]
    assert found.trait is Trait.ROLE_IGNORED


def test_a_template_that_refuses_system_messages_is_a_warning_to_programs() -> None:
    (found,) = [one for one in checked(chatml(before=REFUSING.format(role="system")), PROGRAM) if "role system" in one.found]
    assert (found.trait, found.is_error) == (Trait.ROLE_REFUSED, False)


def test_two_messages_of_the_user_in_a_row_are_tried_for_environments() -> None:
    before = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}"
        "{% endif %}{% endfor %}"
    )
    (found,) = checked(chatml(before=before), ENVIRONMENT)
    assert "behind another" in found.found
    assert not found.is_error


@pytest.mark.parametrize("turn", ["", "{{ m.content }}{{ m.content }}"])
def test_a_turn_that_is_not_written_once_is_an_error_only_where_the_history_is_appended_to(turn: str) -> None:
    """B60"""
    (error,) = checked(chatml(turn), replace(ENVIRONMENT, history="append"))
    assert (error.trait, error.is_error) == (Trait.TURN_NOT_ONCE, True)
    found = checked(chatml(turn), ENVIRONMENT)
    assert Trait.TURN_NOT_ONCE in [one.trait for one in found]
    assert not any(one.is_error for one in found)


def test_a_model_without_a_template_is_an_error() -> None:
    (found,) = checked("", ENVIRONMENT)
    assert (found.trait, found.is_error) == (Trait.NO_TEMPLATE, True)


PIECES = st.sampled_from(
    [
        *MOVED,
        *CALLS.values(),
        "{{ m.content }}",
        "{{ m.content | trim }}",
        "{{ m.nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{% if not m.content %}{{ raise_exception('empty') }}{% endif %}",
        "{{ m.content[5:] }}",
        "<think>",
        "</think>",
    ]
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(PIECES, max_size=4), st.sampled_from([TOOLS, ENVIRONMENT, PROGRAM]), st.sampled_from([QWEN25, QWEN3, DEEPSEEK, ""])
)
def test_no_template_makes_the_check_fail(pieces: list[str], usage: Usage, tail: str) -> None:
    """B60: whatever is wrong with it is found or passed over."""
    for found in checked(chatml("".join(pieces)) + tail, usage):
        assert str(found) == f"{found.found}: {found.follows}"
