//! Support for the tests of `DiskFile`: the ways a transfer can go, files, bytes, comparisons.
//!
//! The files are on a disk (the first directory that is not a tmpfs) and on `/dev/shm`. What a
//! machine does not support (O_DIRECT, tmpfs, permission to mount) is skipped with a printed
//! reason.
//!
//! # Safety
//! Queries the page cache through a mapping that is never read, and mounts a small file system.
#![allow(unsafe_code)]

use bifolio_testing::skip;
use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::error::Error;
use crate::io::transfer::{read_full, write_full};
use crate::io::*;
use crate::sys::probe::{Feature, Features};

pub(super) const BLOCK: usize = 4096;

/// One way to transfer a file.
pub(super) struct Way {
    pub(super) name: &'static str,
    pub(super) directory: TempDir,
    wish: DirectIo,
    pub(super) features: Features,
}

impl Way {
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(super) fn open(&self, name: &str) -> DiskFile {
        let options = DiskOptions {
            read: true,
            write: true,
            create: true,
            truncate: false,
            direct: self.wish,
            ..DiskOptions::default()
        };
        DiskFile::open_with(self.path(name), &options, &self.features).unwrap()
    }
}

pub(super) fn is_tmpfs(path: &Path) -> bool {
    crate::sys::file::is_on_tmpfs(fs::File::open(path).unwrap().as_fd())
}

/// Returns a directory on a disk, or at least not on a tmpfs if possible.
pub(super) fn disk_directory() -> TempDir {
    let places = [std::env::temp_dir(), "/var/tmp".into(), std::env::current_dir().unwrap()];
    let on_disk = places.iter().find(|place| place.is_dir() && !is_tmpfs(place));
    tempfile::tempdir_in(on_disk.unwrap_or(&places[0])).unwrap()
}

pub(super) fn shared_memory_directory() -> Option<TempDir> {
    let place = Path::new("/dev/shm");
    if place.is_dir() && is_tmpfs(place) {
        return Some(tempfile::tempdir_in(place).unwrap());
    }
    skip("tmpfs", "/dev/shm is not a tmpfs");
    None
}

pub(super) fn ways() -> Vec<Way> {
    let way = |name, wish, masked: &[Feature]| Way {
        name,
        directory: disk_directory(),
        wish,
        features: Features::probe(masked),
    };
    let mut ways = vec![
        way("direct, alignment known", DirectIo::Auto, &[]),
        way("direct, alignment guessed", DirectIo::Auto, &[Feature::StatxDirectAlignment]),
        way("buffered, as requested", DirectIo::Never, &[]),
        way("buffered, direct masked", DirectIo::Auto, &[Feature::DirectIo]),
    ];
    if let Some(directory) = shared_memory_directory() {
        ways.push(Way { directory, ..way("buffered, tmpfs", DirectIo::Auto, &[]) });
    }
    ways
}

/// Returns a way that is direct, if this machine has one.
pub(super) fn direct_way() -> Option<(Way, DiskFile)> {
    let way = ways().remove(0);
    let file = way.open("f");
    match file.direct() {
        DirectStatus::Direct => Some((way, file)),
        other => {
            skip(Feature::DirectIo, format!("{}: {other:?}", way.directory.path().display()));
            None
        }
    }
}

pub(super) fn pattern(length: usize, seed: u64) -> Vec<u8> {
    let mut random = fastrand_like(seed);
    (0..length).map(|_| random() as u8).collect()
}

/// A short random number generator (xorshift), so that the library's own tests need no crate for
/// it.
pub(super) fn fastrand_like(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state >> 8
    }
}

pub(super) fn write(file: &DiskFile, bytes: &[u8], position_bytes: u64) {
    write_full(file, &[IoBuffer::from_bytes(bytes).source()], position_bytes, None).unwrap();
}

pub(super) fn read(file: &DiskFile, length: usize, position_bytes: u64) -> Vec<u8> {
    let mut buffer = IoBuffer::new(length);
    let count = read_full(file, &mut [buffer.target()], position_bytes, None).unwrap();
    buffer.as_bytes()[..count].to_vec()
}

/// Checks that the file has exactly these bytes, through its handle and for other programs.
pub(super) fn assert_holds(way: &Way, file: &DiskFile, name: &str, expected: &[u8]) {
    let length = fs::metadata(way.path(name)).unwrap().len();
    assert_eq!(length, expected.len() as u64, "{}: length", way.name);
    assert_eq!(file.len_bytes().unwrap(), length, "{}: our length", way.name);
    assert!(fs::read(way.path(name)).unwrap() == expected, "{}: bytes on disk", way.name);
    let frames = expected.len().next_multiple_of(BLOCK) + BLOCK;
    assert!(read(file, frames, 0) == expected, "{}: bytes through the backing", way.name);
}

/// Returns the bytes of the file in the kernel's page cache, in whole pages.
pub(super) fn cached_pages(path: &Path) -> usize {
    let file = fs::File::open(path).unwrap();
    let length = file.metadata().unwrap().len() as usize;
    resident_pages(&file, length)
}

pub(super) fn resident_pages(file: &fs::File, length: usize) -> usize {
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
    let null = std::ptr::null_mut();
    // SAFETY: a new mapping at an address of the kernel's choice; it is never accessed.
    let map = unsafe { mmap(null, length, ProtFlags::READ, MapFlags::SHARED, file, 0) }.unwrap();
    let mut resident = vec![0_u8; length.div_ceil(BLOCK)];
    // SAFETY: the mapping is `length` bytes long and `resident` has a byte for each page of it.
    let answer = unsafe { libc::mincore(map, length, resident.as_mut_ptr()) };
    assert_eq!(answer, 0);
    // SAFETY: exactly the mapping made above.
    unsafe { munmap(map, length) }.unwrap();
    resident.iter().filter(|page| **page & 1 == 1).count()
}

/// A tmpfs of 64 KiB, where the user may mount one.
pub(super) struct SmallFileSystem(TempDir);

impl SmallFileSystem {
    pub(super) fn path(&self) -> &Path {
        self.0.path()
    }
}

pub(super) fn small_file_system() -> Option<SmallFileSystem> {
    let directory = tempfile::tempdir().unwrap();
    let path = CString::new(directory.path().as_os_str().as_bytes()).unwrap();
    let (kind, size) = (c"tmpfs".as_ptr(), c"size=64k".as_ptr().cast());
    // SAFETY: all four are NUL-terminated strings that outlive the call.
    if unsafe { libc::mount(kind, path.as_ptr(), kind, 0, size) } != 0 {
        skip("root", format!("cannot mount a tmpfs: {}", io::Error::last_os_error()));
        return None;
    }
    Some(SmallFileSystem(directory))
}

impl Drop for SmallFileSystem {
    fn drop(&mut self) {
        let path = CString::new(self.path().as_os_str().as_bytes()).unwrap();
        // SAFETY: a NUL-terminated string that outlives the call.
        unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
    }
}

pub(super) fn read_only(path: &Path) -> Result<DiskFile, Error> {
    let options = DiskOptions { read: true, ..DiskOptions::default() };
    DiskFile::open_with(path, &options, &Features::probe(&[]))
}

pub(super) fn read_write(path: &Path) -> Result<DiskFile, Error> {
    let options =
        DiskOptions { read: true, write: true, create: true, truncate: true, ..Default::default() };
    DiskFile::open_with(path, &options, &Features::probe(&[]))
}
