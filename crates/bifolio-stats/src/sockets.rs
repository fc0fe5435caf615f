//! The sockets of this user: their directory, and how one is made, found and removed.
//!
//! A socket is bound in a new directory that no other user can enter, gets its mode there, and is
//! then linked to its name `PROCESS-NUMBER.sock`: at no time can another user connect, whatever the
//! file mode mask is, and no name is ever taken from a socket that is in use. The directory may be
//! shared with another PID namespace, in which the same process numbers mean other processes, so a
//! socket counts as stale only if a connection to it is refused.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// Returns the directory of the sockets of this user: `/run/bifolio` for root, otherwise `bifolio`
/// in `$XDG_RUNTIME_DIR`, or `/tmp/bifolio-UID`. It exists only if there were any.
pub fn directory() -> PathBuf {
    let user = rustix::process::geteuid();
    if user.is_root() {
        return "/run/bifolio".into();
    }
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(directory) if !directory.is_empty() => Path::new(&directory).join("bifolio"),
        _ => format!("/tmp/bifolio-{}", user.as_raw()).into(),
    }
}

/// The name of a socket; removed with this value, unless it names another socket by then.
#[derive(Debug)]
pub(crate) struct Socket {
    path: PathBuf,
    /// Device and inode.
    identity: (u64, u64),
}

impl Socket {
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if identity(&self.path).is_ok_and(|found| found == self.identity) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|found| (found.dev(), found.ino()))
}

/// Binds a socket in `directory`, and removes the stale ones there.
pub(crate) fn bind(directory: &Path) -> io::Result<(UnixListener, Socket)> {
    create_private(directory)?;
    remove_stale(directory);
    let hidden = tempfile::Builder::new()
        .prefix(".")
        .permissions(Permissions::from_mode(0o700))
        .tempdir_in(directory)?;
    let unnamed = hidden.path().join("s");
    let listener = UnixListener::bind(&unnamed)?;
    fs::set_permissions(&unnamed, Permissions::from_mode(0o600))?;
    let identity = identity(&unnamed)?;
    let process = std::process::id();
    for number in 0_u32.. {
        let path = directory.join(format!("{process}-{number}.sock"));
        match fs::hard_link(&unnamed, &path) {
            Ok(()) => return Ok((listener, Socket { path, identity })),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::ErrorKind::AddrInUse.into())
}

/// Creates a directory to which only this user has access.
fn create_private(directory: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let found = fs::symlink_metadata(directory)?;
    let is_own = found.uid() == rustix::process::geteuid().as_raw();
    if found.is_dir() && is_own && found.mode() & 0o022 == 0 {
        return Ok(());
    }
    let problem =
        format!("{}: not a directory that only this user can change", directory.display());
    Err(io::Error::new(io::ErrorKind::PermissionDenied, problem))
}

/// Removes the sockets of servers that have ended without removing them.
fn remove_stale(directory: &Path) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        if name.to_str().is_some_and(is_name) && is_stale(&entry.path()) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Returns `true` for `PROCESS-NUMBER.sock`.
fn is_name(name: &str) -> bool {
    let is_number = |text: &str| text.parse::<u32>().is_ok();
    let numbers = name.strip_suffix(".sock").and_then(|numbers| numbers.split_once('-'));
    numbers.is_some_and(|(process, number)| is_number(process) && is_number(number))
}

/// Returns `true` if the file is a socket of this user to which no process listens.
fn is_stale(path: &Path) -> bool {
    let is_own = fs::symlink_metadata(path).is_ok_and(|found| {
        found.file_type().is_socket() && found.uid() == rustix::process::geteuid().as_raw()
    });
    // Nonblocking: a listener with a full queue is no reason to wait.
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let refused = || {
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).ok()?;
        let address = SocketAddrUnix::new(path).ok()?;
        Some(connect(&socket, &address) == Err(Errno::CONNREFUSED))
    };
    is_own && refused().unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    /// Not by the process's file mode mask, which another test changes for a moment.
    fn private_directory() -> tempfile::TempDir {
        let mode = Permissions::from_mode(0o700);
        tempfile::Builder::new().permissions(mode).tempdir().unwrap()
    }

    #[test]
    fn only_stale_sockets_of_servers_are_removed() {
        let directory = private_directory();
        let path = |name: &str| directory.path().join(name);
        // As of a process in another namespace: no process here has that number.
        let listening = UnixListener::bind(path("4294967295-0.sock")).unwrap();
        drop(UnixListener::bind(path("4294967295-1.sock")).unwrap());
        drop(UnixListener::bind(path("4294967295-mine.sock")).unwrap());
        fs::write(path("4294967295-2.sock"), "data").unwrap();
        fs::write(path("4294967295-backup"), "data").unwrap();
        let (_listener, socket) = bind(directory.path()).unwrap();
        let mut names: Vec<String> = fs::read_dir(directory.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        let own = socket.path().file_name().unwrap().to_str().unwrap();
        let mut expected = vec![
            "4294967295-0.sock",
            "4294967295-2.sock",
            "4294967295-backup",
            "4294967295-mine.sock",
            own,
        ];
        expected.sort_unstable();
        assert_eq!(names, expected);
        drop(listening);
    }

    #[test]
    fn a_socket_that_is_in_use_keeps_its_name() {
        let directory = private_directory();
        // As of a process with the number of this one, in another namespace.
        let taken = directory.path().join(format!("{}-0.sock", std::process::id()));
        let other = UnixListener::bind(&taken).unwrap();
        let (_listener, socket) = bind(directory.path()).unwrap();
        assert_ne!(socket.path(), taken);
        UnixStream::connect(&taken).unwrap();
        other.accept().unwrap();
    }

    #[test]
    fn a_name_that_another_socket_has_taken_over_stays() {
        let directory = private_directory();
        let (_listener, socket) = bind(directory.path()).unwrap();
        let path = socket.path().to_owned();
        fs::remove_file(&path).unwrap();
        let _other = UnixListener::bind(&path).unwrap();
        drop(socket);
        assert!(path.exists());
    }

    #[test]
    fn no_other_user_can_open_a_socket_in_a_readable_directory() {
        let directory = private_directory();
        fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).unwrap();
        let before = rustix::process::umask(rustix::fs::Mode::empty());
        let bound = bind(directory.path());
        rustix::process::umask(before);
        let (_listener, socket) = bound.unwrap();
        let mode = fs::metadata(socket.path()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        fs::set_permissions(directory.path(), Permissions::from_mode(0o777)).unwrap();
        let refused = bind(directory.path()).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
    }
}
