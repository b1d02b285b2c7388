"""Completion scripts for bash and zsh, made from the parsers and the catalogue, so that they know every option."""

import argparse
from collections.abc import Iterator

from vmahybrid.config import catalogue
from vmahybrid.config.catalogue import Catalogue, Parameter
from vmahybrid.config.service import BY_NAME, KEYS
from vmahybrid.vma_stats import options

BASH = """# bash completion of vmahybrid and vma_stats; vmahybrid completion bash printed it

# In the words of its caller: of --name=va and NAME=va cur is va, name what stands before it and head what must stand
# before each answer. bash takes "=" for a word of its own, zsh does not.
_vmahybrid_word() {{
    cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} name= head=
    if [[ $cur == "=" ]]; then
        name=$prev cur=
    elif [[ $prev == "=" ]]; then
        name=${{COMP_WORDS[COMP_CWORD-2]}}
    elif [[ $cur == *=* ]]; then
        name=${{cur%%=*}} head=${{cur%%=*}}= cur=${{cur#*=}}
    fi
}}

_vmahybrid_profiles() {{
    local file
    echo "{profiles}"
    for file in "${{VMA_HYBRID_PROFILE_DIR:-{profile_directory}}}"/*.conf; do
        [[ -e $file ]] && file=${{file##*/}} && echo "${{file%.conf}}"
    done
}}

# Programs that have a statistics file in this directory
_vmahybrid_pids() {{
    local file
    for file in "$1"/vmastat.*; do
        [[ -d /proc/${{file##*.}} ]] && echo "${{file##*.}}"
    done
}}

_vmahybrid_names() {{
    local pid
    for pid in $(_vmahybrid_pids "$1"); do
        cat "/proc/$pid/comm" 2>/dev/null
    done
}}

# What may stand behind NAME=
_vmahybrid_values() {{
    case "$name" in
        VMA_SPEC|--profile) compgen -P "$head" -W "$(_vmahybrid_profiles)" -- "$cur"; compgen -P "$head" -f -- "$cur" ;;
{values}
    esac
}}

# place, not path: zsh has that for its own
_vmahybrid() {{
    local cur prev name head place= word index programs=${{VMA_STATS_SHMEM_DIR:-{directory}}}
    _vmahybrid_word
    for ((index = 1; index < COMP_CWORD; index++)); do
        word=${{COMP_WORDS[index]}}
        case "$place:$word" in
{nest}
        esac
        if [[ ($place == run || $place == softverbs) && $word == -- ]]; then
            [[ -z ${{ZSH_VERSION-}} ]] && declare -F _command_offset >/dev/null && _command_offset $((index + 1))
            return
        fi
    done
    if [[ -n $name ]]; then
        COMPREPLY=($(_vmahybrid_values))
        return
    fi
    case "$place:$prev" in
        run:-p|run:--profile)
            COMPREPLY=($(compgen -W "$(_vmahybrid_profiles)" -- "$cur") $(compgen -f -- "$cur")); return ;;
        "config check":*)
            COMPREPLY=($(compgen -f -- "$cur") $(compgen -W "--json" -- "$cur")); return ;;
        "config import":*)
            COMPREPLY=($(compgen -f -- "$cur") $(compgen -W "--force --json" -- "$cur")); return ;;
        run:-e|run:--env)
            compopt -o nospace 2>/dev/null; COMPREPLY=($(compgen -S = -W "{parameters}" -- "$cur")); return ;;
        doctor:*)
            COMPREPLY=($(compgen -W "--json --verbs-selftest $(ls /sys/class/net 2>/dev/null)" -- "$cur")); return ;;
    esac
    [[ $place == "config set" ]] && compopt -o nospace 2>/dev/null
    case "$place" in
{words}
    esac
    case "$place" in
        explain|home|adopt|"config show"|"config diff")
            COMPREPLY+=($(compgen -W "$(_vmahybrid_pids "$programs")" -- "$cur")) ;;
    esac
    case "$place" in
        "config diff"|"config profiles") COMPREPLY+=($(compgen -W "$(_vmahybrid_profiles)" -- "$cur")) ;;
    esac
}}
complete -F _vmahybrid vmahybrid

_vma_stats() {{
    local cur prev name head index directory={directory} pid=
    _vmahybrid_word
    for ((index = 1; index < COMP_CWORD; index++)); do
        case "${{COMP_WORDS[index]}}" in
            -k|--directory) directory=${{COMP_WORDS[index+1]}} ;;
            -p|--pid) pid=${{COMP_WORDS[index+1]}} ;;
        esac
    done
    ((COMP_CWORD > 2)) && case "${{COMP_WORDS[COMP_CWORD-2]}}" in
        -S|--fd_dump) COMPREPLY=($(compgen -W "{levels}" -- "$cur")); return ;;
    esac
    case "${{name:-$prev}}" in
{stats_values}
    esac
    COMPREPLY=($(compgen -W "{stats_options}" -- "$cur"))
}}
complete -F _vma_stats vma_stats
"""
CHOICES_MOST = 10  # of a number, that are offered


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    known = catalogue.load()
    names = [parameter.name for parameter in known.parameters]
    profiles = [profile.name for profile in known.profiles]
    more = {
        "config show": names,
        "config set": [f"{name}=" for name in (*names, *BY_NAME)],
        "config diff": ["default", "env"],
    }
    levels = [(path, words + more.get(path, [])) for path, words in _levels(parser, "")]
    nest = [f'            "{path.rpartition(" ")[0]}:{path.split()[-1]}") place="{path}" ;;' for path, _ in levels[1:]]
    words = [f'        "{path}") COMPREPLY=($(compgen -W "{" ".join(found)}" -- "$cur")) ;;' for path, found in levels]
    bash = BASH.format(
        nest="\n".join(nest),
        words="\n".join(words),
        profiles=" ".join(profiles),
        parameters=" ".join(names),
        profile_directory=known["VMA_HYBRID_PROFILE_DIR"].default,
        directory=options.DEFAULT_DIRECTORY.rstrip("/"),
        values="\n".join(_values(known)),
        levels=" ".join(_of_parameter(known["VMA_TRACELEVEL"])),
        stats_values="\n".join(_stats_values(known)),
        stats_options=" ".join([*(f"-{letter}" for letter in options.SHORT if letter.isalpha()),
                                *(f"--{name.rstrip('=')}" for name in options.LONG)]),
    )
    if shell == "bash":
        return bash
    return "#compdef vmahybrid vma_stats\nautoload -U +X bashcompinit && bashcompinit\n" + bash


def _of_parameter(parameter: Parameter) -> list[str]:
    """Its values, where they are few."""
    if parameter.choices:
        return [choice.words[0] for choice in parameter.choices]
    return ["0", "1"] if parameter.type == "bool" else []


def _values(known: Catalogue) -> Iterator[str]:
    """The cases of parameters and of the service's keys."""
    found = {parameter.name: _of_parameter(parameter) for parameter in known.parameters}
    for key in KEYS:
        schema = key.parse.schema
        few = {"boolean": ["true", "false"]}.get(str(schema["type"]), schema.get("enum", []))
        found[key.name] = [str(word) for word in few]
    for name, words in found.items():
        if words:
            yield f'        {name}) compgen -P "$head" -W "{" ".join(words)}" -- "$cur" ;;'
    texts = [p.name for p in known.parameters if p.type == "string" and not p.choices and p.name != "VMA_SPEC"]
    yield f'        {"|".join(texts)}) compgen -P "$head" -f -- "$cur" ;;'


def _stats_values(known: Catalogue) -> Iterator[str]:
    """The cases of vma_stats's options that take something."""
    words = {
        "p": '$(_vmahybrid_pids "$directory")',
        "n": '$(_vmahybrid_names "$directory")',
        "l": " ".join(_of_parameter(known["VMA_TRACELEVEL"])),
        "S": '0 $(ls "/proc/$pid/fd" 2>/dev/null)',
    }
    words |= {letter: " ".join(map(str, range(low, high + 1)))
              for letter, (_, _, low, high) in options.NUMBERS.items() if high - low < CHOICES_MOST}
    for name in options.LONG:
        if name.endswith("="):
            letter = options.LETTERS[name[:-1]]
            offer = "-d" if letter == "k" else f'-W "{words.get(letter, "")}"'
            yield f'        -{letter}|--{name[:-1]}) COMPREPLY=($(compgen -P "$head" {offer} -- "$cur")); return ;;'


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
