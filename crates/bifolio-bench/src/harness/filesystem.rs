//! The storage under a directory: which file system, and how much is free.

use std::path::Path;

use rustix::fs::{statfs, statvfs};

use crate::error::{Error, Result};

/// Names of the file systems a benchmark may meet, by the number statfs gives.
const NAMES: [(u64, &str); 14] = [
    (TMPFS, "tmpfs"),
    (RAMFS, "ramfs"),
    (0xef53, "ext4"),
    (0x5846_5342, "xfs"),
    (0x9123_683e, "btrfs"),
    (0xf2f5_2010, "f2fs"),
    (0x2fc1_2fc1, "zfs"),
    (0xca45_1a4e, "bcachefs"),
    (0x794c_7630, "overlayfs"),
    (0x6969, "nfs"),
    (0xff53_4d42, "cifs"),
    (0x6573_5546, "fuse"),
    (0x0102_1997, "9p"),
    (0x4d44, "vfat"),
];
const TMPFS: u64 = 0x0102_1994;
const RAMFS: u64 = 0x8584_58f6;

/// The file system under a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FileSystem {
    pub(crate) name: String,
    /// Set if its files are only in memory.
    pub(crate) in_memory: bool,
    /// Bytes that an ordinary user may still write.
    pub(crate) free_bytes: u64,
}

impl FileSystem {
    /// Asks the kernel about `directory`.
    pub(crate) fn of(directory: &Path) -> Result<Self> {
        let ask = || Error::system(format!("ask for the file system of {}", directory.display()));
        // The field is signed or not, wide or not, as the architecture has it; the number is 32
        // bits.
        let number = statfs(directory).map_err(ask())?.f_type as u64 & 0xffff_ffff;
        let space = statvfs(directory).map_err(ask())?;
        Ok(Self {
            name: name_of(number),
            in_memory: number == TMPFS || number == RAMFS,
            free_bytes: space.f_bavail.saturating_mul(space.f_frsize),
        })
    }
}

fn name_of(number: u64) -> String {
    let known = NAMES.iter().find(|(known, _)| *known == number);
    known.map_or_else(|| format!("{number:#x}"), |(_, name)| (*name).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tells_memory_from_other_file_systems() {
        let here = FileSystem::of(Path::new(".")).unwrap();
        assert!(here.free_bytes > 0 && !here.name.is_empty());
        assert!(!FileSystem::of(Path::new("/proc")).unwrap().in_memory);
        assert!(FileSystem::of(Path::new("/no/such/directory")).is_err());
        assert_eq!(name_of(TMPFS), "tmpfs");
        assert_eq!(name_of(0x1234), "0x1234");
    }
}
