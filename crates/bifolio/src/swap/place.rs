//! Where the swap file is, and how it is opened.
//!
//! Called once by [`Swap::open`](super::Swap::open).
//!
//! | place | the file | its bytes afterwards |
//! |---|---|---|
//! | `In(directory)` | has no name: nobody else finds it | gone with its last descriptor |
//! | `File(path)` | made if absent; else empty, or ours by its header | stay until the next open |
//! | `Backing(yours)` | taken as it is | yours to know |
//!
//! A file with a name is locked (`flock`) before it is looked at, for as long as it is open: two
//! caches in one file would overwrite each other's pages. Nothing is changed in it before its
//! header has been seen. Files that are made here are readable by their owner only: they hold
//! what was in memory.
//!
//! A child made by `fork` shares descriptors, so the lock and the bytes of a file without a name
//! last until it, too, is gone or has executed something else.
//!
//! The header is the first page, by which a later run knows the file for its own. It says nothing
//! about the rest of the file, which is of use only to the cache that wrote it.
//!
//! ```text
//!   0                    16           20                          4092        4096
//!  +--------------------+------------+---------------------------+-----------+
//!  |  magic             |  version   |  zeros                    |  CRC-32   |   little-endian
//!  +--------------------+------------+---------------------------+-----------+
//! ```

use super::PAGE_BYTES;
use crate::error::{ErrorKind, Result, SwapFileProblem};
use crate::io;
use crate::io::{Backing, DiskFile, DiskOptions, FileIdentity, Guarded, IoBuffer, OpenDiskError};
use crate::sys::file;
use crate::sys::file::OpenMode;
use crate::sys::probe::Features;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const OPTIONS: DiskOptions = DiskOptions {
    read: true,
    write: true,
    create: false,
    create_new: false,
    mode: None,
    truncate: false,
    direct: io::DirectIo::Auto,
};

/// See the head of the file.
#[derive(Clone, Debug)]
pub(crate) enum SwapPlace {
    /// A temporary file in this directory.
    In(PathBuf),
    /// This file, for one cache at a time.
    File(PathBuf),
    /// Storage of the caller's.
    Backing(Arc<dyn Backing>),
}

/// A swap file that is open, and ours.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) backing: Arc<dyn Backing>,
    /// Keeps other caches away while it is open.
    pub(super) lock: Option<OwnedFd>,
}

/// Opens the swap file.
pub(super) fn open(place: SwapPlace, features: &Features) -> Result<Opened> {
    match place {
        SwapPlace::In(directory) => {
            let file = open_temporary(&directory, features)?;
            Ok(Opened { backing: Arc::new(file), lock: None })
        }
        SwapPlace::File(path) => open_named(&path, features),
        SwapPlace::Backing(backing) => {
            Ok(Opened { backing: Arc::new(Guarded::new(backing)?), lock: None })
        }
    }
}

fn open_temporary(directory: &Path, features: &Features) -> Result<DiskFile> {
    // File systems without files that have no name, and systems without /proc, have the second way.
    let opened = match open_unnamed(directory, features) {
        Some(file) => Ok(file),
        None => open_unlinked(directory, features),
    };
    Ok(opened?.called(directory.join("(temporary swap file)")))
}

/// A file that never has a name.
pub(super) fn open_unnamed(directory: &Path, features: &Features) -> Option<DiskFile> {
    let made = file::create_unnamed(directory).ok()?;
    DiskFile::open(file::path_of(made.as_fd()), &OPTIONS, features).ok()
}

/// A file that loses its name as soon as it is open.
pub(super) fn open_unlinked(directory: &Path, features: &Features) -> Result<DiskFile> {
    let fail = |source| {
        let problem = SwapFileProblem::NoTemporaryFile(source);
        ErrorKind::SwapFile { path: directory.to_owned(), problem }
    };
    // The standard library asks the system for the randomness of its hash tables.
    let random = RandomState::new().build_hasher().finish();
    let path = directory.join(format!(".bifolio-swap-{random:016x}"));
    let made = file::create_private(&path).map_err(fail)?;
    let opened = open_same(&path, &made, features);
    if !matches!(opened, Err(OpenDiskError::Replaced { .. })) {
        file::unlink(&path).map_err(fail)?;
    }
    Ok(opened?)
}

fn open_named(path: &Path, features: &Features) -> Result<Opened> {
    let refuse = |problem| ErrorKind::SwapFile { path: path.to_owned(), problem };
    make_if_absent(path)?;
    let backing = DiskFile::open(path, &OPTIONS, features)?;
    let lock = open_again(path)?;
    check_same(path, &lock, &backing)?;
    match file::try_lock(lock.as_fd()) {
        Ok(true) => {}
        Ok(false) => return Err(refuse(SwapFileProblem::InUse).into()),
        Err(source) => return Err(refuse(SwapFileProblem::Lock(source)).into()),
    }
    if io::len_bytes(&backing)? == 0 {
        write_header(&backing)?;
    } else {
        read_header(&backing)?.map_err(refuse)?;
        io::set_len(&backing, PAGE_BYTES as u64)?;
    }
    Ok(Opened { backing: Arc::new(backing), lock: Some(lock) })
}

fn make_if_absent(path: &Path) -> std::result::Result<(), OpenDiskError> {
    match file::create_private(path) {
        Err(source) if source.kind() != std::io::ErrorKind::AlreadyExists => {
            Err(OpenDiskError::System { path: path.to_owned(), source })
        }
        _ => Ok(()),
    }
}

/// Opens `path` as the file that was `made` there.
pub(super) fn open_same(
    path: &Path,
    made: &OwnedFd,
    features: &Features,
) -> std::result::Result<DiskFile, OpenDiskError> {
    let opened = DiskFile::open(path, &OPTIONS, features)?;
    check_same(path, made, &opened)?;
    Ok(opened)
}

/// A descriptor of our own: the lock goes when it is closed, and not before.
fn open_again(path: &Path) -> std::result::Result<OwnedFd, OpenDiskError> {
    let mode = OpenMode { read: true, write: true, create: None, direct: false };
    file::open(path, mode).map_err(|source| OpenDiskError::System { path: path.to_owned(), source })
}

/// Whether `path` meant one file both times.
fn check_same(
    path: &Path,
    descriptor: &OwnedFd,
    opened: &DiskFile,
) -> std::result::Result<(), OpenDiskError> {
    let status = file::status(descriptor.as_fd())
        .map_err(|source| OpenDiskError::System { path: path.to_owned(), source })?;
    let identity = FileIdentity::of(status);
    if opened.identity() == Some(identity) {
        return Ok(());
    }
    Err(OpenDiskError::Replaced { path: path.to_owned() })
}

fn write_header(backing: &dyn Backing) -> Result<()> {
    let buffer = IoBuffer::from_bytes(&header());
    io::write_full(backing, &[buffer.source()], 0, None)?;
    Ok(())
}

/// The fault of the header, if it can be read.
fn read_header(backing: &dyn Backing) -> Result<std::result::Result<(), SwapFileProblem>> {
    let mut buffer = IoBuffer::new(PAGE_BYTES);
    let count = io::read_full(backing, &mut [buffer.target()], 0, None)?;
    let bytes = buffer.as_bytes()[..count].first_chunk();
    Ok(bytes.map_or(Err(SwapFileProblem::Foreign), check))
}

const MAGIC: [u8; 16] = *b"bifolio spill\r\n\0";
const VERSION: u32 = 1;
const VERSION_START: usize = MAGIC.len();
const CHECKSUM_START: usize = PAGE_BYTES - size_of::<u32>();

/// The header that is written to an empty file.
fn header() -> [u8; PAGE_BYTES] {
    header_of(VERSION)
}

/// Whether a file that begins like this may be used, and overwritten.
fn check(bytes: &[u8; PAGE_BYTES]) -> std::result::Result<(), SwapFileProblem> {
    let field = |start: usize| {
        let field = bytes[start..].first_chunk().expect("a field ends inside the header");
        u32::from_le_bytes(*field)
    };
    let is_ours = bytes.starts_with(&MAGIC);
    if !is_ours || field(CHECKSUM_START) != crc32fast::hash(&bytes[..CHECKSUM_START]) {
        return Err(SwapFileProblem::Foreign);
    }
    match field(VERSION_START) {
        VERSION => Ok(()),
        found => Err(SwapFileProblem::OtherVersion { found, expected: VERSION }),
    }
}

fn header_of(version: u32) -> [u8; PAGE_BYTES] {
    let mut bytes = [0; PAGE_BYTES];
    bytes[..VERSION_START].copy_from_slice(&MAGIC);
    bytes[VERSION_START..][..size_of::<u32>()].copy_from_slice(&version.to_le_bytes());
    let checksum = crc32fast::hash(&bytes[..CHECKSUM_START]);
    bytes[CHECKSUM_START..].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_known_again_and_every_changed_byte_is_noticed() {
        assert!(check(&header()).is_ok());
        for at in 0..PAGE_BYTES {
            let mut changed = header();
            changed[at] ^= 1;
            assert!(matches!(check(&changed), Err(SwapFileProblem::Foreign)), "byte {at}");
        }
        assert!(matches!(check(&[0; PAGE_BYTES]), Err(SwapFileProblem::Foreign)));
        // Another program may sum up its pages in the same place.
        let mut foreign = [7; PAGE_BYTES];
        let checksum = crc32fast::hash(&foreign[..CHECKSUM_START]);
        foreign[CHECKSUM_START..].copy_from_slice(&checksum.to_le_bytes());
        assert!(matches!(check(&foreign), Err(SwapFileProblem::Foreign)));
    }

    #[test]
    fn the_format_of_another_version_is_refused_by_its_number() {
        let problem = check(&header_of(7)).unwrap_err();
        assert!(matches!(problem, SwapFileProblem::OtherVersion { found: 7, expected: VERSION }));
    }

    #[test]
    fn the_format_stays_what_it_was() {
        let header = header();
        assert_eq!(header[..20], *b"bifolio spill\r\n\0\x01\0\0\0");
        assert_eq!(header[20..CHECKSUM_START], [0; CHECKSUM_START - 20]);
    }
}
