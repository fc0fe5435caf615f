//! The mount of the file system at its target, and the unmount at the program's own end.
//!
//! Called by `session.rs`. Root calls `mount(2)`; `fusermount3` mounts for other users and sends
//! the connection, a descriptor of `/dev/fuse`. The type in `/proc/mounts` is `fuse.bifolio` for
//! both.
//!
//! Any program may unmount the target at any time, and mount something else there at once. So the
//! session never unmounts because it has ended, and [`Mount::detach`] unmounts only what it has
//! recognised: it pins what is mounted at the target by a descriptor, and compares the device
//! number with the one that the file system got. The kernel gives a number to another file system
//! only after this one is gone, and then the connection is dead. The unmount goes by the
//! descriptor, not by the path (a user other than root can only name the path, to `fusermount3`,
//! which unmounts file systems of that user and no other).

use std::ffi::{CString, OsStr, OsString};
use std::io::{ErrorKind, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags, openat, statx, syncfs};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

/// The helper that mounts for users other than root.
const HELPER: &str = "fusermount3";
/// Type of the file system, with the subtype by which programs tell it from others.
const KIND: &str = "fuse.bifolio";

/// A mounted file system.
pub struct Mount {
    pub target: PathBuf,
    /// Another descriptor of the connection that the session uses.
    connection: OwnedFd,
    device: Device,
}

/// Users of the mount, and what they may do.
#[derive(Clone, Copy)]
struct How {
    is_for_all_users: bool,
    refusals: MountFlags,
}

/// Major and minor device number of a file system.
type Device = (u32, u32);

impl Mount {
    /// Mounts on `target`, with `source` as the name of the device. Returns the connection, too, on
    /// which the kernel sends its requests.
    pub fn new(
        source: &Path,
        target: &Path,
        is_for_all_users: bool,
        refusals: MountFlags,
    ) -> Result<(Self, OwnedFd)> {
        let how = How { is_for_all_users, refusals };
        let connection = match mount_directly(source, target, how) {
            Err(error) if is_refused(&error) => mount_by_helper(source, target, how)?,
            connection => connection?,
        };
        let device = device_of(&open_root(target)?)?;
        let second = connection.try_clone().context("cannot duplicate a descriptor")?;
        Ok((Self { target: target.to_owned(), connection: second, device }, connection))
    }

    /// Returns `false` when the file system is gone: it is mounted nowhere, and no program uses it.
    pub fn is_alive(&self) -> bool {
        let mut polled = [PollFd::new(&self.connection, PollFlags::empty())];
        let no_wait = Timespec { tv_sec: 0, tv_nsec: 0 };
        // An error, such as ENOMEM, says nothing.
        poll(&mut polled, Some(&no_wait)).is_err() || !polled[0].revents().contains(PollFlags::ERR)
    }

    /// Acts as [`Self::detach`] after the kernel has written what it has of the file system, which
    /// something must serve.
    pub fn write_and_detach(&self) -> Result<()> {
        let root = self.open()?;
        let directory = openat(&root, ".", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        // What programs have stored to shared maps.
        if let Err(error) = directory.and_then(|directory| syncfs(&directory)) {
            log::warn!("cannot write what the kernel has of {}: {error}", self.target.display());
        }
        drop(root);
        self.detach()
    }

    /// Takes the file system away from the target. Programs that use it keep it. Fails if something
    /// else is mounted at the target, or nothing.
    pub fn detach(&self) -> Result<()> {
        let root = self.open()?;
        let path = format!("/proc/self/fd/{}", root.as_raw_fd());
        match unmount(path, UnmountFlags::DETACH) {
            // The file system ends with `root`, if no program uses it.
            Ok(()) => Ok(()),
            Err(Errno::PERM) => {
                drop(root);
                unmount_by_helper(&self.target)
            }
            Err(error) => bail!("{error}"),
        }
    }

    /// Opens the file system at the target, if it is this one.
    fn open(&self) -> Result<OwnedFd> {
        let root = open_root(&self.target)?;
        // The connection is alive while `root` holds a file system: if that is another one, it has
        // another number.
        let is_ours = device_of(&root)? == self.device && self.is_alive();
        ensure!(is_ours, "another file system is mounted there, or none");
        Ok(root)
    }
}

/// Opens the directory that a path names, without a request to its file system.
fn open_root(path: &Path) -> Result<OwnedFd> {
    let root = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    root.with_context(|| format!("cannot find {}", path.display()))
}

/// Returns the device number of a file system, without a request to it: no thread answers yet.
fn device_of(root: &OwnedFd) -> Result<Device> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let status = statx(root, c"", flags, StatxFlags::empty()).context("statx failed")?;
    Ok((status.stx_dev_major, status.stx_dev_minor))
}

/// Returns `true` if only a privileged helper may do it.
fn is_refused(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(&Errno::PERM | &Errno::ACCESS))
}

fn mount_directly(source: &Path, target: &Path, how: How) -> Result<OwnedFd> {
    let device = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
    let device = device.context("cannot open /dev/fuse (is the kernel module `fuse` loaded?)")?;
    let mut options = format!(
        "fd={},rootmode=40000,user_id={},group_id={},default_permissions",
        device.as_raw_fd(),
        rustix::process::getuid().as_raw(),
        rustix::process::getgid().as_raw()
    );
    if how.is_for_all_users {
        options.push_str(",allow_other");
    }
    let options = CString::new(options)?;
    let flags = MountFlags::NODEV | MountFlags::NOSUID | how.refusals;
    mount(source, target, KIND, flags, &*options)
        .with_context(|| format!("cannot mount on {}", target.display()))?;
    Ok(device)
}

/// Mounts with the help of a program that may do so, and sends the connection over a socket.
fn mount_by_helper(source: &Path, target: &Path, how: How) -> Result<OwnedFd> {
    let (socket, of_helper) = UnixStream::pair().context("cannot create a socket")?;
    let mut options = b"fsname=".to_vec();
    for byte in source.as_os_str().as_bytes() {
        // Commas separate options.
        if matches!(byte, b',' | b'\\') {
            options.push(b'\\');
        }
        options.push(*byte);
    }
    options.extend_from_slice(b",subtype=bifolio,default_permissions,nodev,nosuid");
    for (flag, name) in [(MountFlags::RDONLY, ",ro"), (MountFlags::NOEXEC, ",noexec")] {
        if how.refusals.contains(flag) {
            options.extend_from_slice(name.as_bytes());
        }
    }
    if how.is_for_all_users {
        options.extend_from_slice(b",allow_other");
    }
    let mut helper = Command::new(HELPER);
    helper.arg("-o").arg(OsString::from_vec(options)).arg(OsStr::new("--")).arg(target);
    helper.env("_FUSE_COMMFD", "0").stdin(OwnedFd::from(of_helper));
    let child = helper.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().map_err(no_helper)?;
    // It has the helper's end of the socket, whose close is the helper's end for the receiver.
    drop(helper);
    let connection = receive_descriptor(&socket);
    let output = child.wait_with_output().with_context(|| format!("cannot wait for {HELPER}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "cannot mount on {}: {}", target.display(), said.trim());
    connection?.with_context(|| format!("{HELPER} has sent no descriptor: {}", said.trim()))
}

/// Receives a descriptor, or `None` if the other end is closed.
fn receive_descriptor(socket: &UnixStream) -> Result<Option<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut messages = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let received = rustix::io::retry_on_intr(|| {
        let mut target = [IoSliceMut::new(&mut byte)];
        recvmsg(socket, &mut target, &mut messages, RecvFlags::CMSG_CLOEXEC)
    });
    received.with_context(|| format!("cannot receive from {HELPER}"))?;
    Ok(messages.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    }))
}

fn unmount_by_helper(target: &Path) -> Result<()> {
    let mut helper = Command::new(HELPER);
    let output = helper.args(["-u", "-z", "--"]).arg(target).output().map_err(no_helper)?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}

fn no_helper(error: std::io::Error) -> anyhow::Error {
    let hint = match error.kind() {
        ErrorKind::NotFound => "; install it (package fuse3), or mount as root",
        _ => "",
    };
    anyhow::anyhow!("a user other than root needs {HELPER}, which cannot be started: {error}{hint}")
}
