"""The overlay's state in this process: whether it is on, its options, and which rows are applied.

Start at `enable` and `Session`. One lock guards the state.
"""

import contextlib
import dataclasses
import importlib
import sys
import threading
import warnings
from collections.abc import Container, Iterable, Iterator

from . import choices, report, series, versions
from .distributed import config
from .errors import ChangedTarget, OptionError, OverlayError, UnknownRelease
from .patching import engine, recognise
from .patching.import_hook import AfterImport
from .patching.patch import Patch
from .version import __version__ as version

# enable() imports torch, and with it most modules that are patched. Rows for other modules wait until their import.
TORCH = "torch"

_lock = threading.RLock()
_session: "Session | None" = None
_chosen = choices.DEFAULT
_blocks: "list[OpenBlock]" = []  # the enabled() blocks that are open, in the order in which they began


class Session:
    """What enable() did, until disable(): the changes that were made, and the rows that wait or were left out. Making
    one changes nothing.

    Args:
        release: of torch.
        strict: whether a row that can't be applied is an error.
        leave_out: units whose rows are not applied.

    Attributes:
        patches: the rows for this release.
        changes: by row, what was changed.
        refused: by row, why it is left out.
        waiting: by module, the rows that wait for its import.
        hook: tells of these imports; None if nothing waits.
    """

    def __init__(self, release: versions.Release, strict: bool, leave_out: Container[str] = ()):
        self.release = release
        self.strict = strict
        rows = [patch for patch in series.PATCHES if release.in_range(patch)]
        self.patches = [patch for patch in rows if patch.unit not in leave_out]
        self.changes: dict[Patch, engine.Change] = {}
        self.refused: dict[Patch, str] = {}
        self.waiting: dict[str, list[Patch]] = {}
        self.hook: AfterImport | None = None
        self.sources: dict[str, recognise.Source] = {}

    def source(self, module: str) -> recognise.Source:
        """Return the source file of a module, read at most once until `apply`."""
        # A file is read once for all of its rows: device_mesh.py alone has some forty.
        if module not in self.sources:
            self.sources[module] = recognise.source_of(module)
        return self.sources[module]

    def unrecognised(self, patch: Patch, live: object) -> str | None:
        """Say what is there instead of a row's target (`live`; None to look at the source file alone), or None if that
        is the right one."""
        return versions.unrecognised(patch, self.release, self.source(patch.module), live)

    def recognise_targets(self) -> None:
        """Compare each target with torch's source file, and import the bodies of rows whose modules are imported. If
        the session is strict, raises for another target; else refuses the row. Call it without our lock: imports take
        their own."""
        refused = {patch: why for patch in self.patches if (why := self.unrecognised(patch, None))}
        self.refuse(refused)
        self.import_bodies(patch for patch in self.patches if ready(patch.module))

    def import_bodies(self, patches: Iterable[Patch]) -> None:
        """Import the bodies of these rows, and refuse the units of those that can't be, or raise if strict. Call it
        without our lock: imports take their own."""
        for patch in patches:
            try:
                if patch not in self.refused:
                    engine.import_body(patch)
            except OverlayError as error:
                if self.strict:
                    raise
                self.refuse({patch: str(error)})

    def begin(self) -> None:
        """Apply the rows whose modules are imported, all or none, and list the others in `waiting` by module. Call
        `recognise_targets` first. If the session isn't strict, rows whose live target isn't torch's are refused."""
        rows = [patch for patch in self.patches if patch not in self.refused]
        # Asked once: another thread may import a module meanwhile, and its rows would be neither applied nor waiting.
        here = {module for module in {patch.module for patch in rows} if ready(module)}
        self.apply([patch for patch in rows if patch.module in here])
        for patch in rows:
            if patch.module not in here and patch not in self.refused:
                self.waiting.setdefault(patch.module, []).append(patch)

    def apply(self, patches: list[Patch]) -> None:
        """Check these rows against the live objects, then apply all of them or none. A row whose target isn't torch's
        is left out with its unit; if the session is strict, that raises."""
        changes, refused = engine.prepare(patches, self.unrecognised)
        self.refuse(refused)
        # A refused row takes the others of its unit with it, also those that were recognised.
        changes = {patch: change for patch, change in changes.items() if patch not in self.refused}
        engine.apply(changes.values())
        self.changes |= changes
        self.sources.clear()  # texts and syntax trees, which nobody needs again unless a module arrives later

    def arrive(self, modules: list[str]) -> None:
        """Apply the rows that waited for these modules, all or none. Raises as `apply`; the rows wait on then."""
        self.apply([p for module in modules for p in self.waiting.get(module, ()) if p not in self.refused])
        for module in modules:
            self.waiting.pop(module, None)

    def refuse(self, refused: dict[Patch, str]) -> None:
        """Note in `refused` these rows, with what is there instead, and the others of their units that aren't applied
        yet; raise if the session is strict. A row that is applied stays so, also if a later one of its unit is
        refused."""
        if refused and self.strict:
            lines = [f"  {patch.target}: {why}" for patch, why in refused.items()]
            raise ChangedTarget(
                f"{len(refused)} of {len(self.patches)} targets aren't what torch {self.release.name} has there, so "
                "nothing was patched:\n" + "\n".join(lines) + "\nTake other patches of these away before enable(), or "
                "call enable(strict=False) to leave these rows out."
            )
        self.refused |= refused
        self.refused |= engine.fallen((p for p in self.patches if p not in self.changes), self.refused)

    def end(self, force: bool) -> None:
        """Undo all changes, and stop waiting; nothing, if somebody patched over ours, unless `force` undoes that,
        too."""
        # All are looked at before the first is undone: a foreign patch must not leave the overlay half on.
        changes = list(self.changes.values())
        if not force:
            engine.check_ours(changes)
        if self.hook is not None:
            self.hook.remove()
        self.changes = {}
        engine.undo(changes)


def ready(module: str) -> bool:
    """True if the module is imported, and its import isn't under way any more."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return module in sys.modules and not getattr(spec, "_initializing", False)


def enable(strict: bool | None = None, **options: object) -> report.Status:
    """See `torch_overlay.enable`, also for the errors."""
    global _session
    with _lock:
        is_on = _change_if_on(strict, options)
    if is_on:
        return _status()
    # Importing torch and the bodies takes the import system's locks. Another thread may hold one of them and wait for
    # ours, in `_arrived`, so none of this runs under ours.
    chosen = choices.choose(choices.from_environment(), options)
    strict = choices.strict_from_environment() if strict is None else strict
    importlib.import_module(TORCH)
    release = versions.running()
    if strict:
        versions.require_supported(release)
    session = Session(release, strict, chosen.leave_out)
    session.recognise_targets()
    with _lock:
        is_on = _change_if_on(strict, options)  # another thread was faster
        if not is_on:
            session.begin()
            _set_options(chosen)
            config.versions = {"torch": release.name, "torch_overlay": version}
            _session = session
            if session.waiting:
                session.hook = AfterImport(list(session.waiting), lambda modules: _arrived(session, modules))
                session.hook.install()
    if not is_on:
        # Another thread may have imported some between `recognise_targets` and the hook. No callback came for these.
        _arrived(session, [module for module in list(session.waiting) if ready(module)])
    return _status()


def require_recognised() -> None:
    """Check that torch's release is known, or that the overlay is on: enable(strict=False) accepts any."""
    if _session is None:
        versions.require_supported(versions.running())


def _change_if_on(strict: bool | None, options: dict[str, object]) -> bool:
    """If the overlay is on, change the named options and keep the others. The caller holds the lock."""
    if _session is None:
        return False
    if strict and _session.refused:
        rows = ", ".join(patch.target for patch in _session.refused)
        raise ChangedTarget(f"The overlay is on without these rows: {rows}. disable() it to ask for all of them")
    if options:
        before = _chosen
        after = choices.choose(before, options)
        if after.leave_out != before.leave_out:
            raise OptionError(
                f"The overlay is on with leave_out={before.leave_out}. disable() it to ask for {after.leave_out}"
            )
        _set_options(after)
    return True


def _set_options(chosen: choices.Choices) -> None:
    """Set these options for the whole process. The caller holds the lock."""
    global _chosen
    _chosen = chosen
    settings = choices.settings(dataclasses.asdict(chosen))
    vars(config).update(settings, option_names={setting: name for name, setting in choices.SETTINGS.items()})


def _arrived(session: Session, modules: list[str]) -> None:
    """Patch modules that rows waited for, now that they are imported. Their bodies are imported without our lock."""
    session.import_bodies([patch for module in modules for patch in session.waiting.get(module, ())])
    with _lock:
        if session is _session:  # else disable() came while the bodies were imported
            session.arrive(modules)


def disable(force: bool = False) -> None:
    """See `torch_overlay.disable`, also for the errors."""
    global _session
    with _lock:
        if _session is None:
            return
        try:
            _session.end(force)
        finally:
            # A ForeignPatch undid nothing, and the overlay stays on. After any other error it is off.
            if not _session.changes:
                _session = None
                _set_options(choices.DEFAULT)


@dataclasses.dataclass(eq=False)
class OpenBlock:
    """One ``with enabled()`` that is open.

    Attributes:
        before: the options before the block; None if the overlay was off.
        thread: the thread that opened it.
    """

    before: choices.Choices | None
    thread: int = dataclasses.field(default_factory=threading.get_ident)


@contextlib.contextmanager
def enabled(strict: bool | None = None, **options: object) -> Iterator[report.Status]:
    """See `torch_overlay.enabled`. Yields what `enable` returns."""
    with _lock:
        block = OpenBlock(_chosen if _session is not None else None)
        _blocks.append(block)  # before enable(), so that another thread that leaves its block doesn't disable() now
    try:
        now = enable(strict, **options)
    except BaseException:
        _leave(block, entered=False)
        raise
    try:
        yield now
    except BaseException as error:
        _leave_after(block, error)
        raise
    _leave(block)


def _leave(block: OpenBlock, entered: bool = True) -> None:
    """Restore the state before the block."""
    with _lock:
        place = _blocks.index(block)
        _blocks.remove(block)
        if _blocks[place:]:
            # Threads may leave in any order: the block that began next restores what this one would have restored.
            _blocks[place].before = block.before
        elif not entered:  # its enable() failed, and changed nothing
            return
        elif block.before is not None:
            if _session is not None:
                _set_options(block.before)
        elif all(other.thread == block.thread for other in _blocks):
            disable()  # a block of another thread that is still open will do it at its end


def _leave_after(block: OpenBlock, error: BaseException) -> None:
    """Leave a block that raised. Its own error is what the caller sees, so an error of leaving becomes a note of it."""
    try:
        _leave(block)
    except Exception as failure:
        text = f"torch_overlay.enabled() couldn't put torch back after this error: {failure}"
        add_note = getattr(error, "add_note", None)  # since Python 3.11
        if add_note is None:
            warnings.warn(text, stacklevel=4)
        else:
            add_note(text)


def is_enabled() -> bool:
    """See `torch_overlay.is_enabled`."""
    return _session is not None


def is_awaited() -> bool:
    """True under `run` before torch is imported: then the overlay goes on as soon as it is."""
    return any(isinstance(finder, AfterImport) and TORCH in finder.wanted for finder in sys.meta_path)


def options() -> choices.Choices:
    """See `torch_overlay.options`, also for the error."""
    with _lock:
        return _chosen if _session is not None else choices.from_environment()


def status() -> report.Status:
    """See `torch_overlay.status`."""
    watch = sys.modules.get("torch_overlay.rendezvous.watch")
    transfers = () if watch is None else watch.under_way()  # which asks other ranks, so without the lock
    return dataclasses.replace(_status(), transfers=transfers)


def _status() -> report.Status:
    """Return the status without the transfers under way. Raises as `options`. Call it without our lock."""
    groups = report.groups()  # which imports a module
    with _lock:
        release = _session.release.described if _session else _release_text()
        rows = tuple(_row(patch) for patch in series.PATCHES)
        return report.Status(_session is not None, release, rows, options(), report.count(), groups)


def _release_text() -> str:
    """Return the release of torch as text; "none" if torch isn't installed, or its version has no number."""
    try:
        return versions.running().described
    except UnknownRelease:
        return "none"


def _row(patch: Patch) -> report.RowStatus:
    """Return the state of a row, and the reason if the overlay is on and the row isn't applied."""
    state, why = "off", ""
    if _session is not None:
        if patch in _session.changes:
            state = "on"
        elif patch in _session.refused:
            state, why = "left out", _session.refused[patch]
        elif patch.unit in _chosen.leave_out:
            state, why = "off", f"leave_out names {patch.unit}"
        elif not _session.release.in_range(patch):
            ended = f" (ended by {patch.ends})" if patch.ends else ""
            state, why = "stands down", f"for torch {patch.releases}{ended}"
        else:
            state, why = "waiting", "until the module is imported"
    return report.RowStatus(patch.target, patch.kind.value, state, why)
