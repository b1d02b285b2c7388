"""Completion scripts for bash and zsh, made from the parser, so that they know every option."""

import argparse
from collections.abc import Iterator

from vmahybrid.config import catalogue
from vmahybrid.config.service import BY_NAME

BASH = """# bash completion of vmahybrid; vmahybrid completion bash printed it
_vmahybrid() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} path= word index
    for ((index = 1; index < COMP_CWORD; index++)); do
        word=${{COMP_WORDS[index]}}
        case "$path:$word" in
{nest}
        esac
        if [[ ($path == run || $path == softverbs) && $word == -- ]]; then
            declare -F _command_offset >/dev/null && _command_offset $((index + 1))
            return
        fi
    done
    case "$path:$prev" in
        run:-p|run:--profile) COMPREPLY=($(compgen -W "{profiles}" -- "$cur") $(compgen -f -- "$cur")); return ;;
        "config check":*|"config import":*)
            COMPREPLY=($(compgen -f -- "$cur") $(compgen -W "--json" -- "$cur")); return ;;
        run:-e|run:--env) compopt -o nospace; COMPREPLY=($(compgen -S = -W "{parameters}" -- "$cur")); return ;;
        doctor:*)
            COMPREPLY=($(compgen -W "--json --verbs-selftest $(ls /sys/class/net 2>/dev/null)" -- "$cur")); return ;;
    esac
    [[ $path == "config set" ]] && compopt -o nospace 2>/dev/null
    case "$path" in
{words}
    esac
}}
complete -F _vmahybrid vmahybrid
"""


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    known = catalogue.load()
    names = [parameter.name for parameter in known.parameters]
    profiles = [profile.name for profile in known.profiles]
    more = {
        "config show": names,
        "config set": [f"{name}=" for name in (*names, *BY_NAME)],
        "config profiles": profiles,
        "config diff": ["default", "env", *profiles],
    }
    levels = [(path, words + more.get(path, [])) for path, words in _levels(parser, "")]
    nest = [f'            "{path.rpartition(" ")[0]}:{path.split()[-1]}") path="{path}" ;;' for path, _ in levels[1:]]
    words = [f'        "{path}") COMPREPLY=($(compgen -W "{" ".join(found)}" -- "$cur")) ;;' for path, found in levels]
    bash = BASH.format(
        nest="\n".join(nest),
        words="\n".join(words),
        profiles=" ".join(profiles),
        parameters=" ".join(names),
    )
    if shell == "bash":
        return bash
    return "#compdef vmahybrid\nautoload -U +X bashcompinit && bashcompinit\n" + bash


def _levels(parser: argparse.ArgumentParser, path: str) -> Iterator[tuple[str, list[str]]]:
    """For every command and verb: its path, and the words that may follow."""
    words: list[str] = []
    below: list[tuple[str, argparse.ArgumentParser]] = []
    for action in parser._actions:
        words += action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            words += action.choices
            below += action.choices.items()
        elif action.choices and not action.option_strings:
            words += map(str, action.choices)
    yield path, words
    for name, inner in below:
        yield from _levels(inner, f"{path} {name}".strip())
