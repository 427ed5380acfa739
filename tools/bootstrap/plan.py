"""The decisions of set-up, without I/O: what to install, under which name, and which words describe how far it is."""

import ast
import hashlib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LOCKED_PYTHONS = ((3, 11), (3, 12), (3, 13))
LOCKED_PLATFORM = "linux-x86_64"
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_NETWORK_SIGNS = re.compile(
    r"name resolution|name or service not known|failed to establish|connection (refused|timed out|reset)|network is unreachable"
    r"|dns error|failed to fetch|error sending request|read timed out|max retries|proxyerror",
    re.IGNORECASE,
)
_FAILURE = re.compile(r"^\s*(?:×\s*)?(?:error|fatal|caused? by|cause|\w+Error)\b[: ]", re.IGNORECASE)
_ACTIVITY = re.compile(
    r"(?:Downloading|Downloaded|Preparing|Prepared|Collecting|Using cached|Building)\s+([A-Za-z0-9][\w.\-]*)"
)


def normalised(name: str) -> str:
    """The comparable form of a distribution's name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def locked_names(lock: str) -> list[str]:
    """Normalised names pinned by a lock's text, in its order; comments, options and blank lines are not names."""
    lines = (line.split("#")[0].strip() for line in lock.splitlines())
    return [normalised(re.split(r"[=<>!~ \[;@]", line)[0]) for line in lines if line and not line.startswith("-")]


def requirements(pyproject: str, extras: Sequence[str]) -> list[str]:
    """The project's own requirements followed by those of `extras`, as written in the text of a pyproject.toml."""
    project = tomllib.loads(pyproject)["project"]
    return [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]


def environment_name(flavour: str, content: str, python: str, platform: str) -> str:
    """Directory name of the environment that holds exactly `content` for that interpreter and platform."""
    digest = hashlib.sha256("\0".join((flavour, content, python, platform)).encode()).hexdigest()
    return f"env-{flavour}-{digest[:16]}"


def lock_objection(python: tuple[int, int], platform: str) -> str | None:
    """Why the CPU lock does not fit this interpreter or platform; None when it does."""
    if platform != LOCKED_PLATFORM:
        return f"the CPU lock covers {LOCKED_PLATFORM}, this is {platform}: see docs/dependencies.md for installing by hand"
    if python not in LOCKED_PYTHONS:
        known = ", ".join(f"{major}.{minor}" for major, minor in LOCKED_PYTHONS)
        return f"the CPU lock covers Python {known}, this is {python[0]}.{python[1]}: name another with PYTHON=python3.11"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSettings:
    """Where packages come from, as pip is configured; empty where pip's default applies."""

    index_url: str = ""
    extra_index_urls: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    no_index: bool = False
    trusted_hosts: tuple[str, ...] = ()
    cert: str = ""
    client_cert: str = ""
    proxy: str = ""

    def uv_arguments(self) -> list[str]:
        """uv's options that say the same; every index is asked about every package, as pip does."""
        arguments = ["--index-strategy", "unsafe-best-match"]
        arguments += ["--index-url", self.index_url] if self.index_url else []
        arguments += ["--no-index"] if self.no_index else []
        for option, values in (
            ("--extra-index-url", self.extra_index_urls),
            ("--find-links", self.find_links),
            ("--allow-insecure-host", self.trusted_hosts),
        ):
            arguments += [word for value in values for word in (option, value)]
        return arguments

    def uv_environment(self) -> dict[str, str]:
        """Environment variables that carry what uv has no option for."""
        named = {"SSL_CERT_FILE": self.cert, "SSL_CLIENT_CERT": self.client_cert, "ALL_PROXY": self.proxy}
        return {name: value for name, value in named.items() if value}


def index_settings(pip_config_list: str) -> IndexSettings:
    """Reads the output of `pip config list`; the environment wins over `[install]`, which wins over `[global]`."""
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in pip_config_list.splitlines():
        match = re.match(r"(global|install|:env:)\.([\w-]+)=(.*)$", line)
        if match:
            section, key, value = match.groups()
            found[section][key] = _unquoted(value)
    merged = found["global"] | found["install"] | found[":env:"]
    return IndexSettings(
        index_url=merged.get("index-url", ""),
        extra_index_urls=tuple(merged.get("extra-index-url", "").split()),
        find_links=tuple(merged.get("find-links", "").split()),
        no_index=merged.get("no-index", "").lower() in {"1", "true", "yes", "on"},
        trusted_hosts=tuple(merged.get("trusted-host", "").split()),
        cert=merged.get("cert", ""),
        client_cert=merged.get("client-cert", ""),
        proxy=merged.get("proxy", ""),
    )


def _unquoted(value: str) -> str:
    try:
        return str(ast.literal_eval(value))
    except (ValueError, SyntaxError):
        return value


def current_package(log: str) -> str:
    """The package that an installer's log mentions last as being worked on; empty when it mentions none."""
    mentioned = _ACTIVITY.findall(log)
    return re.sub(r"-\d.*\.whl$", "", mentioned[-1]) if mentioned else ""


def failure_line(log: str) -> str:
    """The line of a failed command's log that says most: the last one marked as an error, else the last with text."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    marked = [line for line in lines if _FAILURE.match(line)]
    return (marked or lines or ["no output"])[-1][:300]


def network_line(log: str) -> str:
    """The last line of a failed command's log that speaks of a connection that could not be made; empty when none does."""
    lines = [line.strip() for line in log.splitlines() if _NETWORK_SIGNS.search(line)]
    return lines[-1][:300] if lines else ""


def lacks_torch(log: str) -> bool:
    """Whether an installer stopped because its indexes do not hold the pinned torch build."""
    signs = r"(no version of|no matching distribution found for|because|satisfies the requirement) torch=="
    return re.search(signs, log, re.IGNORECASE) is not None


def torch_objection(version_module: str) -> str | None:
    """Why torch's `version.py` is not that of a CPU build; None when it is."""
    values: Mapping[str, str] = dict(re.findall(r"^(\w+)\b[^=\n]*=\s*(.+?)\s*$", version_module, re.MULTILINE))
    version = values.get("__version__", "nothing").strip("'\"")
    if values.get("cuda", "None") != "None" or not version.endswith("+cpu"):
        return f"torch {version} is not a CPU build"
    return None


def progress(title: str, fetched: int, installed: int, total: int, elapsed_s: float, current: str) -> str:
    """One line on how far an installation is; a count stays out while its phase has not begun or has ended."""
    of = f"/{total}" if total else ""
    counts = f"installed {installed}{of}" if installed else f"fetched {fetched}{of}" if fetched else "starting"
    return f"{title}: {counts}, {elapsed_s:.0f} s" + (f", {current}" if current else "")
