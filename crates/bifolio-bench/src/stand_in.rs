//! A stand-in for memory files until the library has them: a file over a vector.
//!
//! The traits have the names of the methods to come, so that this file, its `mod` line and the
//! `use` lines that name it are all there is to remove. Modes, spills and allocations are ignored.

use std::io;
use std::path::Path;
use std::sync::Arc;

use bifolio::{Backing, Cache, CacheBuilder, File, IoSource, IoTarget, OpenOptions, Result};
use parking_lot::RwLock;

/// `bifolio::ReadMode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadMode {
    Batched,
    OneByOne,
    LockedOneByOne,
}

/// Methods of `CacheBuilder`.
pub(crate) trait BuilderStandIn {
    fn read_mode(self, mode: ReadMode) -> Self;
    fn spill_in(self, directory: impl AsRef<Path>) -> Self;
}

impl BuilderStandIn for CacheBuilder {
    fn read_mode(self, _mode: ReadMode) -> Self {
        self
    }

    fn spill_in(self, _directory: impl AsRef<Path>) -> Self {
        self
    }
}

/// Methods of `Cache`.
pub(crate) trait CacheStandIn {
    fn memory_file_with(&self, name: &str, options: &OpenOptions) -> Result<File>;
}

impl CacheStandIn for Cache {
    fn memory_file_with(&self, _name: &str, options: &OpenOptions) -> Result<File> {
        self.open_backing(Arc::new(Memory::default()), &options.clone().write(true))
    }
}

/// Methods of `File`.
pub(crate) trait FileStandIn {
    fn allocate(&self, range: std::ops::Range<u64>) -> Result<()>;
}

impl FileStandIn for File {
    fn allocate(&self, range: std::ops::Range<u64>) -> Result<()> {
        if range.end > self.len() { self.set_len(range.end) } else { Ok(()) }
    }
}

#[derive(Debug, Default)]
struct Memory(RwLock<Vec<u8>>);

impl Backing for Memory {
    fn read_at(&self, target: &mut IoTarget<'_>, position_bytes: u64) -> io::Result<usize> {
        let bytes = self.0.read();
        let left = &bytes[bytes.len().min(position_bytes as usize)..];
        let here = left.len().min(target.len());
        target.copy_from_slice(0, &left[..here]);
        Ok(here)
    }

    fn write_at(&self, source: &IoSource<'_>, position_bytes: u64) -> io::Result<usize> {
        let mut bytes = self.0.write();
        let (from, to) = (position_bytes as usize, position_bytes as usize + source.len());
        let length = bytes.len().max(to);
        bytes.resize(length, 0);
        source.copy_to_slice(0, &mut bytes[from..to]);
        Ok(source.len())
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn sync_all(&self) -> io::Result<()> {
        Ok(())
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.0.read().len() as u64)
    }

    fn set_len(&self, length_bytes: u64) -> io::Result<()> {
        self.0.write().resize(length_bytes as usize, 0);
        Ok(())
    }

    fn describe(&self) -> String {
        "memory".to_owned()
    }
}

/// The share of neighbouring pages of `file` that lie on neighbouring frames.
pub(crate) fn contiguity_of(_file: &File) -> Option<f64> {
    None
}
