"""Confines this process and becomes the program: ``python -I -S confine.py SPEC``, started by ``program.py``.

    namespaces (mount, pid, net, ipc) -> file system read-only, but for a small tmpfs -> fork -> another uid -> rlimits -> exec

The standard library only. Facts go to the status descriptor as one JSON object: ``{"pid", "has_pid_namespace"}`` once the
program is about to start, or ``{"refused"}`` with the reason. The descriptor stays open until the program has ended.
"""

import ctypes
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (
    0x20000,
    0x8000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
SYS_MOUNT_SETATTR, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, 0x8000, 0x1
PR_SET_PDEATHSIG, PR_SET_SECUREBITS, PR_SET_NO_NEW_PRIVS = 1, 28, 38
SECBIT_NOROOT_LOCKED = 0b11
MAX_INODES = 1024

libc = ctypes.CDLL(None, use_errno=True)


class MountAttributes(ctypes.Structure):
    """``struct mount_attr`` of Linux."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


def main() -> NoReturn:
    """Confine the process as SPEC says, run the program, and exit as it does."""
    spec: dict[str, Any] = json.loads(sys.argv[1])
    os.set_inheritable(spec["status_fd"], False)
    has_namespaces, has_pid_namespace = isolate(spec)
    root = Path(spec["root"])
    python = spec["python"]
    if has_namespaces:
        python = confine_files(root, spec)
    child = os.fork()
    if child == 0:
        become_program(root, python, spec, has_namespaces=has_namespaces)
    end_with_parent(child)
    report(spec, {"pid": child, "has_pid_namespace": has_pid_namespace})
    _, status = os.waitpid(child, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def end_with_parent(child: int) -> None:
    """Kill the program when the process that started this one ends, however it ends."""

    def kill(number: int, frame: object) -> None:
        os.kill(child, signal.SIGKILL)
        os.killpg(0, signal.SIGKILL)

    signal.signal(signal.SIGTERM, kill)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def isolate(spec: dict[str, Any]) -> tuple[bool, bool]:
    """Enter new namespaces; return whether there are mount and pid namespaces. Refuse when the network stays."""
    if os.geteuid() != 0:
        if not unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC):
            refuse(
                spec,
                "this user may not create namespaces, so programs would run with its rights; allow them, or be root",
            )
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {spec['caller_uid']} 1")
        Path("/proc/self/gid_map").write_text(f"0 {spec['caller_gid']} 1")
        return True, True
    has_network_namespace = unshare(CLONE_NEWNET)
    if not has_network_namespace and not spec["allow_network"]:
        refuse(spec, "this machine allows no network namespace, so programs would reach the network")
    unshare(CLONE_NEWIPC)
    return unshare(CLONE_NEWNS), unshare(CLONE_NEWPID)


def confine_files(root: Path, spec: dict[str, Any]) -> str:
    """Make every file system read-only except a new one at root/work; return the interpreter's path inside.

    The interpreter is bound to root/python, since the program's uid may have no way to where it is installed.
    """
    mount(spec, None, "/", None, MS_REC | MS_PRIVATE)
    mount(spec, spec["python_prefix"], str(root / "python"), None, MS_BIND | MS_REC)
    set_read_only(spec, "/")
    options = f"size={spec['disk_mib']}m,nr_inodes={MAX_INODES},mode=777"
    mount(spec, "tmpfs", str(root / "work"), "tmpfs", MS_NOSUID | MS_NODEV, options)
    return str(root / "python" / Path(spec["python"]).relative_to(spec["python_prefix"]))


def become_program(root: Path, python: str, spec: dict[str, Any], *, has_namespaces: bool) -> NoReturn:
    """Drop every right and execute the program; never returns."""
    if has_namespaces:
        libc.mount(b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV, None)  # other processes cannot be seen, if allowed
    try:
        drop_rights(spec)
        os.chdir(root / "work")
        set_limits(spec)
    except (OSError, ValueError) as e:
        refuse(spec, f"rights and limits: {e}")
    environment = {"HOME": str(root / "work"), "TMPDIR": str(root / "work"), "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
    environment["LD_LIBRARY_PATH"] = str(Path(python).parent.parent / "lib")
    try:
        os.execve(python, [python, "-I", "-S", str(root / "program.py")], environment)
    except OSError as e:
        refuse(
            spec,
            f"the interpreter {spec['python']} cannot be run by uid {os.getuid()} ({e.strerror}): move it out of a private folder",
        )


def drop_rights(spec: dict[str, Any]) -> None:
    """Become a uid without rights, of which there is nothing else; a user without root gives up its namespace's rights."""
    if spec["caller_uid"] == 0:
        os.setgroups([])
        os.setresgid(spec["uid"], spec["uid"], spec["uid"])
        os.setresuid(spec["uid"], spec["uid"], spec["uid"])
    else:
        libc.prctl(PR_SET_SECUREBITS, SECBIT_NOROOT_LOCKED, 0, 0, 0)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        refuse(spec, f"no_new_privs: {os.strerror(ctypes.get_errno())}")


def set_limits(spec: dict[str, Any]) -> None:
    """Set the limits of processor time, memory, processes and files."""
    cpu_s = int(spec["cpu_s"]) + 1
    limits = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: spec["memory_mib"] << 20,
        resource.RLIMIT_NPROC: spec["num_processes"],
        resource.RLIMIT_FSIZE: spec["file_mib"] << 20,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for kind, limit in limits.items():
        hard = resource.getrlimit(kind)[1]
        own = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (own, own))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write over the limit fails instead of ending the program


def unshare(flags: int) -> bool:
    """Enter new namespaces; return whether that is allowed here."""
    return int(libc.unshare(flags)) == 0


def mount(
    spec: dict[str, Any], source: str | None, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    """Mount a file system in this process's namespace, or refuse."""
    encoded = [None if text is None else text.encode() for text in (source, target, kind, options)]
    if libc.mount(encoded[0], encoded[1], encoded[2], flags, encoded[3]):
        refuse(spec, f"mount at {target}: {os.strerror(ctypes.get_errno())}")


def set_read_only(spec: dict[str, Any], path: str) -> None:
    """Make a mount and all mounts below it read-only, or refuse."""
    attributes = MountAttributes(attr_set=MOUNT_ATTR_RDONLY)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    if libc.syscall(SYS_MOUNT_SETATTR, -100, path.encode(), AT_RECURSIVE, ctypes.byref(attributes), size):
        refuse(spec, f"read-only file system (mount_setattr, Linux 5.12): {os.strerror(ctypes.get_errno())}")


def report(spec: dict[str, Any], facts: dict[str, Any]) -> None:
    """Write one object to the status descriptor."""
    os.write(spec["status_fd"], json.dumps(facts).encode() + b"\n")


def refuse(spec: dict[str, Any], reason: str) -> NoReturn:
    """Report why nothing is run, and exit."""
    report(spec, {"refused": reason})
    os._exit(1)


if __name__ == "__main__":
    main()
