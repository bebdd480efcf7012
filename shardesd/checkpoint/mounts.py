"""On what kind of filesystem a file lies."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

NETWORK_FILESYSTEMS = re.compile(
    r"9p|acfs|afs|beegfs|ceph|cifs|coda|davfs|fuse(\..*)?|gfs2|glusterfs|gpfs|lustre|ncpfs|nfs4?|ocfs2|orangefs|panfs"
    r"|prl_fs|pvfs2|smb3|smbfs|vboxsf|virtiofs|vmhgfs|wekafs"
)
"""Types in /proc/self/mountinfo on which a mapping is slow or unsafe."""


def is_network(path: Path) -> bool:
    """Whether `path` lies on a network (or FUSE, or host-shared) filesystem; False where that can't be known."""
    try:
        mountinfo = Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape")
        kind = filesystem(path.resolve().as_posix(), mountinfo)
    except OSError:
        return False
    return NETWORK_FILESYSTEMS.fullmatch(kind) is not None


def filesystem(path: str, mountinfo: str) -> str:
    """The type of the filesystem that the absolute `path` lies on, by the text of a mountinfo; "" if none fits.

    A line is ``id parent major:minor root mount-point options … - type source super-options`` (proc(5)).
    """
    parts = PurePosixPath(path).parts
    kind, depth = "", 0
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        if len(left.split()) < 5 or not right:
            continue
        point = PurePosixPath(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), left.split()[4])).parts
        # `>=`: of two mounts on one point, the later one covers the earlier.
        if len(point) >= depth and parts[: len(point)] == point:
            kind, depth = right.split()[0], len(point)
    return kind
