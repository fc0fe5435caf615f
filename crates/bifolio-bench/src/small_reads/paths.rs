//! The ways to the same bytes, each a [`ReadPath`] for the timed loop.
//!
//! A read in here is one call of what is measured and nothing else. Files of the kernel are opened
//! by each thread for itself: a descriptor shared by threads would cost the kernel a contended
//! count that is not the page cache's.

use std::convert::Infallible;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::io::{Errno, pread};

use crate::error::{Error, Result};
use crate::harness::plain_memory::PlainMemory;
use crate::harness::timed::{ReadPath, Reader};

/// `pread` of a file.
#[derive(Debug)]
pub(crate) struct Kernel(PathBuf);

impl Kernel {
    pub(crate) fn new(path: &Path) -> Self {
        Self(path.to_owned())
    }
}

impl ReadPath for Kernel {
    type Reader = File;
    const SYSCALLS_PER_READ: Option<u64> = Some(1);

    fn reader(&self) -> Result<File> {
        File::open(&self.0).map_err(Error::system(format!("open {}", self.0.display())))
    }
}

impl Reader for File {
    type Failure = Errno;

    #[inline(always)]
    fn read<const BLOCK: usize>(
        &mut self,
        block: &mut [u8; BLOCK],
        pos_bytes: u64,
    ) -> Result<usize, Errno> {
        pread(&*self, block, pos_bytes)
    }
}

impl From<Errno> for Error {
    fn from(errno: Errno) -> Self {
        Self::system("read the file with pread")(errno)
    }
}

/// A file in a cache, and that cache.
#[derive(Clone, Debug)]
pub(crate) struct Cached {
    pub(crate) cache: bifolio::Cache,
    pub(crate) file: bifolio::File,
}

impl Cached {
    fn counters(&self) -> Vec<(&'static str, u64)> {
        let stats = self.cache.stats();
        vec![
            ("hits_optimistic", stats.hits_optimistic),
            ("hits_pinned", stats.hits_pinned),
            ("hits_slow", stats.hits_slow),
            ("pins", stats.pins),
            ("optimistic_retries", stats.optimistic_retries),
            ("misses", stats.misses),
            // Each request of a device is one; a hit makes none.
            ("syscalls", stats.read_requests + stats.writeback + stats.syncs),
        ]
    }
}

/// `read_at` through a cache.
#[derive(Debug)]
pub(crate) struct Optimistic(pub(crate) Cached);

/// One thread's [`Optimistic`].
#[derive(Debug)]
pub(crate) struct OptimisticReader(bifolio::File);

impl ReadPath for Optimistic {
    type Reader = OptimisticReader;
    const SYSCALLS_PER_READ: Option<u64> = None;

    fn reader(&self) -> Result<OptimisticReader> {
        Ok(OptimisticReader(self.0.file.clone()))
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.0.counters()
    }
}

impl Reader for OptimisticReader {
    type Failure = bifolio::Error;

    #[inline(always)]
    fn read<const BLOCK: usize>(
        &mut self,
        block: &mut [u8; BLOCK],
        pos_bytes: u64,
    ) -> Result<usize, bifolio::Error> {
        self.0.read_at(block, pos_bytes)
    }
}

/// Pin, copy, unpin, through a cache.
#[derive(Debug)]
pub(crate) struct Pinned(pub(crate) Cached);

/// One thread's [`Pinned`].
#[derive(Debug)]
pub(crate) struct PinnedReader(bifolio::File);

impl ReadPath for Pinned {
    type Reader = PinnedReader;
    const SYSCALLS_PER_READ: Option<u64> = None;

    fn reader(&self) -> Result<PinnedReader> {
        Ok(PinnedReader(self.0.file.clone()))
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.0.counters()
    }
}

impl Reader for PinnedReader {
    type Failure = bifolio::Error;

    #[inline(always)]
    fn read<const BLOCK: usize>(
        &mut self,
        block: &mut [u8; BLOCK],
        pos_bytes: u64,
    ) -> Result<usize, bifolio::Error> {
        let pin = self.0.pin(pos_bytes..pos_bytes + BLOCK as u64)?;
        pin.copy_to(0, block).unwrap();
        Ok(BLOCK)
    }
}

/// A copy from plain memory.
#[derive(Debug)]
pub(crate) struct Plain(Arc<PlainMemory>);

impl Plain {
    pub(crate) fn new(memory: PlainMemory) -> Self {
        Self(Arc::new(memory))
    }
}

impl ReadPath for Plain {
    type Reader = Arc<PlainMemory>;
    const SYSCALLS_PER_READ: Option<u64> = Some(0);

    fn reader(&self) -> Result<Arc<PlainMemory>> {
        Ok(Arc::clone(&self.0))
    }
}

impl Reader for Arc<PlainMemory> {
    type Failure = Infallible;

    #[inline(always)]
    fn read<const BLOCK: usize>(
        &mut self,
        block: &mut [u8; BLOCK],
        pos_bytes: u64,
    ) -> Result<usize, Infallible> {
        // A position of a file in memory fits.
        self.copy(block, pos_bytes as usize);
        Ok(BLOCK)
    }
}

impl From<Infallible> for Error {
    fn from(never: Infallible) -> Self {
        match never {}
    }
}
