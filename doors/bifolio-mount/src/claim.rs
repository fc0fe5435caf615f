//! The claim of a mount on its source: no file may be served by two caches.
//!
//! Each directory has three locks, which belong to the directory itself, so that another path, a
//! bind mount or another mount namespace leads to the same ones:
//!
//! | lock | held on | refuses a mount of |
//! |---|---|---|
//! | `flock`, exclusive | the source | the same directory |
//! | byte [`SERVED`] | the source | a directory within it |
//! | byte [`ABOVE`] | each directory above the source | a directory that contains it |
//!
//! The bytes are read-locked: directories cannot be opened for writing. A claim takes its locks
//! first, then asks for conflicting ones. Of two claims at the same time, each sees the other's or
//! comes before it, so never do both succeed. The locks end with the process, after everything is
//! written. A program may wait for that by `flock`.
//!
//! A directory that is reached through a bind mount has other directories above it where its whole
//! file system is mounted: [`places`] finds those.

use std::ffi::OsString;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use nix::fcntl::{FcntlArg, fcntl};
use rustix::fs::{FlockOperation, Mode, OFlags, flock, fstat};
use rustix::io::Errno;

/// Byte of the lock on a source.
const SERVED: i64 = 1 << 40;
/// Byte of the lock on each directory above a source.
const ABOVE: i64 = SERVED + 1;

/// The locks of a mount; they end with this.
pub struct Claim {
    /// The source directory.
    pub root: OwnedFd,
    above: Vec<(PathBuf, OwnedFd)>,
}

impl Claim {
    /// Locks a source, or says why it cannot be mounted on `target`. Both paths are canonical.
    pub fn new(source: &Path, target: &Path) -> Result<Self> {
        let mounts = mounts()?;
        check_mounts(source, &mounts)?;
        let root = open_directory(source);
        let root = root.with_context(|| format!("cannot open {}", source.display()))?;
        match flock(&root, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => bail!(
                "{} is mounted already, or still being written after an unmount: another \
                 bifolio-mount has locked it",
                source.display()
            ),
            locked => locked.with_context(|| format!("cannot lock {}", source.display()))?,
        }
        let mut above = Vec::new();
        for place in places(source, &root, &mounts)? {
            // A directory that this user cannot read has no lock.
            let ancestors = place.ancestors().skip(1).map(Path::to_owned);
            above.extend(ancestors.filter_map(|path| {
                let directory = open_directory(&path).ok()?;
                Some((path, directory))
            }));
        }
        let claim = Self { root, above };
        claim.lock()?;
        claim.check(source)?;
        check_target(source, target)?;
        Ok(claim)
    }

    fn lock(&self) -> Result<()> {
        lock(&self.root, SERVED).context("cannot lock the source directory")?;
        // A file system that has no such locks cannot be asked for them, either.
        for (_, directory) in &self.above {
            let _ = lock(directory, ABOVE);
        }
        Ok(())
    }

    fn check(&self, source: &Path) -> Result<()> {
        ensure!(
            !is_locked(&self.root, ABOVE),
            "a directory within {} is mounted by another bifolio-mount: a file must not be in two \
             caches",
            source.display()
        );
        for (path, directory) in &self.above {
            ensure!(
                !is_locked(directory, SERVED),
                "{} is within {}, which another bifolio-mount has mounted: a file must not be in \
                 two caches",
                source.display(),
                path.display()
            );
        }
        Ok(())
    }
}

/// Refuses a target that would appear in a source, as a part of it: the source itself is below the
/// target, but a directory within it is not.
fn check_target(source: &Path, target: &Path) -> Result<()> {
    ensure!(
        target == source || !target.starts_with(source),
        "{} is inside of {}: it would contain itself",
        target.display(),
        source.display()
    );
    for above in target.ancestors().skip(1) {
        ensure!(
            above == source || !open_directory(above).is_ok_and(|above| is_locked(&above, SERVED)),
            "{} is within {}, which another bifolio-mount has mounted: it would serve this mount, \
             too",
            target.display(),
            above.display()
        );
    }
    Ok(())
}

/// Refuses a source that is, or contains, what another `bifolio-mount` serves.
fn check_mounts(source: &Path, mounts: &[Mount]) -> Result<()> {
    let ours = |mount: &&Mount| mount.kind == "fuse.bifolio";
    if let Some(covering) = covering(source, mounts).filter(ours) {
        bail!(
            "{} is on {}, which is a mount of bifolio-mount: a file must not be in two caches",
            source.display(),
            covering.point.display()
        );
    }
    let within = mounts.iter().filter(ours).find(|mount| mount.point.starts_with(source));
    if let Some(within) = within {
        bail!(
            "{} in {} is a mount of bifolio-mount: a file must not be in two caches",
            within.point.display(),
            source.display()
        );
    }
    Ok(())
}

/// Returns the paths of the source: its own, and those where the directory appears because more of
/// its file system is mounted elsewhere.
fn places(source: &Path, root: &OwnedFd, mounts: &[Mount]) -> Result<Vec<PathBuf>> {
    let mut places = vec![source.to_owned()];
    let Some(mount) = covering(source, mounts) else { return Ok(places) };
    // The path in the file system.
    let inner = join(&mount.root, source.strip_prefix(&mount.point)?);
    let status = fstat(root)?;
    for other in mounts.iter().filter(|other| other.device == mount.device) {
        let Ok(rest) = inner.strip_prefix(&other.root) else { continue };
        let place = join(&other.point, rest);
        let is_same = open_directory(&place)
            .and_then(|found| fstat(&found))
            .is_ok_and(|found| (found.st_dev, found.st_ino) == (status.st_dev, status.st_ino));
        if is_same && !places.contains(&place) {
            places.push(place);
        }
    }
    Ok(places)
}

/// Joins paths, without a slash at the end if `rest` is empty.
fn join(path: &Path, rest: &Path) -> PathBuf {
    if rest.as_os_str().is_empty() { path.to_owned() } else { path.join(rest) }
}

/// A line of the list of mounts.
struct Mount {
    /// Major and minor number of the file system.
    device: OsString,
    /// Directory of the file system that is mounted.
    root: PathBuf,
    /// Directory on which it is mounted.
    point: PathBuf,
    kind: OsString,
}

/// Returns the mount that a path is on.
fn covering<'a>(path: &Path, mounts: &'a [Mount]) -> Option<&'a Mount> {
    // Of those on the same directory, the last covers the others.
    let covering = mounts.iter().filter(|mount| path.starts_with(&mount.point));
    covering.max_by_key(|mount| mount.point.as_os_str().len())
}

/// Returns the mounts that this process sees.
fn mounts() -> Result<Vec<Mount>> {
    let list = fs::read("/proc/self/mountinfo").context("cannot read /proc/self/mountinfo")?;
    Ok(list.split(|byte| *byte == b'\n').filter_map(parse).collect())
}

/// Parses a line such as `36 35 98:0 /root /point rw,noatime shared:1 - ext4 /dev/sda1 rw`.
fn parse(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|byte| *byte == b' ').skip(2).map(unescape);
    let (device, root, point) = (fields.next()?, fields.next()?, fields.next()?);
    let kind = fields.skip_while(|field| field != "-").nth(1)?;
    Some(Mount { device, root: root.into(), point: point.into(), kind })
}

/// Replaces `\040` and the like by the byte.
fn unescape(field: &[u8]) -> OsString {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, after)) = rest.split_first() {
        let digits = after.get(..3).filter(|_| *first == b'\\');
        let code =
            digits.and_then(|digits| u8::from_str_radix(str::from_utf8(digits).ok()?, 8).ok());
        bytes.push(code.unwrap_or(*first));
        rest = if code.is_some() { &after[3..] } else { after };
    }
    OsString::from_vec(bytes)
}

fn open_directory(path: &Path) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty())
}

fn byte_lock(kind: i32, byte: i64) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: byte,
        l_len: 1,
        l_pid: 0,
    }
}

/// Takes a read lock of a byte, which ends with the descriptor.
fn lock(directory: &OwnedFd, byte: i64) -> nix::Result<()> {
    fcntl(directory, FcntlArg::F_OFD_SETLK(&byte_lock(libc::F_RDLCK, byte))).map(drop)
}

/// Returns `true` if another descriptor has locked the byte.
fn is_locked(directory: &OwnedFd, byte: i64) -> bool {
    let mut wanted = byte_lock(libc::F_WRLCK, byte);
    let asked = fcntl(directory, FcntlArg::F_OFD_GETLK(&mut wanted));
    asked.is_ok() && i32::from(wanted.l_type) != libc::F_UNLCK
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_mounts_with_escapes_and_optional_fields_are_parsed() {
        let line = br"36 35 98:0 / /mnt/a\040b\134c rw shared:1 master:2 - fuse.bifolio /x rw";
        let mount = parse(line).unwrap();
        assert_eq!(mount.point, Path::new(r"/mnt/a b\c"));
        assert_eq!(
            (mount.device.as_os_str(), mount.kind.as_os_str()),
            ("98:0".as_ref(), "fuse.bifolio".as_ref())
        );
        assert_eq!(mount.root, Path::new("/"));
        assert!(parse(b"").is_none());
        let mount = parse(b"36 35 98:0 /root /mnt rw - ext4 /dev/sda rw").unwrap();
        assert_eq!((mount.root, mount.kind.as_os_str()), ("/root".into(), "ext4".as_ref()));
    }
}
