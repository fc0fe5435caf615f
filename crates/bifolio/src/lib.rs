//! A user-space page cache for storage engines and data systems.
//!
//! [`Cache`] holds pages of files under a hard bound on memory. [`File`] reads, writes, pins and
//! syncs them: a hit is an optimistic copy without a lock, a reference or a shared write; a pin is
//! one atomic add; a miss goes past the kernel's page cache to the device; errors are returned,
//! with file, position, length and cause, and never lose data.
//!
//! # I have a B-tree
//!
//! Nodes are searched in place, changed under a pin, and durable after a sync. Folios as large as a
//! node make a node one read.
//!
//! ```
//! # let path = tempfile::NamedTempFile::new()?.into_temp_path();
//! # std::fs::write(&path, vec![7; 100_000])?;
//! # use bifolio::{Cache, OpenOptions};
//! let cache = Cache::builder().memory(64 << 20).build()?; // a hard bound, bytes
//! let tree = cache.open(&path, &OpenOptions::new().write(true))?;
//! let key = tree.read_with(4096..8192, |node| node.u64_le(16))?;
//! let next = key.map_or(0, |key| key.wrapping_add(1));
//! tree.pin_mut(4096..8192)?.copy_from(16, &next.to_le_bytes()).unwrap();
//! tree.sync_data()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # I have a log
//!
//! Records that several threads append follow each other, and their syncs share a flush. With a
//! [`GatedFile`], no page of a tree reaches the storage before its record in the log does.
//!
//! ```
//! # let directory = tempfile::tempdir()?;
//! # let path = directory.path().join("log");
//! # use bifolio::{Cache, OpenOptions};
//! # let cache = Cache::builder().memory(4 << 20).build()?;
//! let log = cache.open(&path, &OpenOptions::new().write(true).create(true))?;
//! let position = log.append(b"a record")?;
//! log.sync_data()?;
//! cache.sync_directory(directory.path())?; // the name of a new file
//! # assert_eq!(position, 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # I have an index of immutable files
//!
//! Pinned pages are slices; the misses of a batch are read together.
//!
//! ```
//! # let path = tempfile::NamedTempFile::new()?.into_temp_path();
//! # std::fs::write(&path, vec![7; 100_000])?;
//! # use bifolio::{Cache, OpenOptions};
//! # let cache = Cache::builder().memory(4 << 20).build()?;
//! let segment = cache.open_immutable(&path, &OpenOptions::new())?;
//! for page in segment.pin_many(&[0..4096, 40_960..45_056, 81_920..86_016]) {
//!     assert_eq!(page?.iter().max(), Some(&7));
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # I need scratch space
//!
//! Memory files are as large as the swap on disk allows, within the same bound.
//!
//! ```
//! # let directory = tempfile::tempdir()?;
//! # use bifolio::Cache;
//! let cache = Cache::builder().memory(1 << 20).swap_directory(directory.path()).build()?;
//! let runs = cache.memory_file("sorted runs")?;
//! let position = runs.append(&vec![7; 4 << 20])?; // four times the bound
//! # assert_eq!(position, 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # I have a server that must not block
//!
//! ```
//! # let path = tempfile::NamedTempFile::new()?.into_temp_path();
//! # std::fs::write(&path, vec![7; 100_000])?;
//! # use bifolio::{Cache, ErrorKind, OpenOptions};
//! # let cache = Cache::builder().memory(4 << 20).build()?;
//! # bifolio_testing::block_on(async {
//! let file = cache.open(&path, &OpenOptions::new())?;
//! let mut buffer = vec![0; 4096];
//! if file.try_read_at(&mut buffer, 8192).is_err() {
//!     buffer = file.read_async(buffer, 8192).await?; // needs no runtime; drop it at any moment
//! }
//! let page = file.pin_async(8192..12_288).await?; // without a copy
//! # assert_eq!(page.to_vec(), buffer);
//! # assert_eq!(buffer, [7; 4096]);
//! # bifolio::Result::Ok(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Storage that is no file of the system implements [`backing::Backing`]; files that code wants as
//! plain memory are a [`Map`]. `docs/guide.md` has recipes, in the same order; `ARCHITECTURE.md`
//! tells one read, one eviction and one fault from end to end.
//!
//! # Features
//!
//! - `maps`, on by default: files as memory ([`Map`]). Without it no file can be opened
//!   [`mappable`](OpenOptions::mappable).
//! - `fork`: locks without a table of the process, so that a forked child can build a cache of its
//!   own.
#![cfg_attr(all(test, loom), allow(dead_code, unused_imports))]
#![cfg_attr(not(feature = "maps"), allow(dead_code, unused_imports, reason = "maps alone use it"))]

#[cfg(not(all(test, loom)))]
mod cache;
#[cfg(not(all(test, loom)))]
mod config;
#[cfg(not(all(test, loom)))]
mod dirt;
#[cfg(not(all(test, loom)))]
mod error;
#[cfg(not(all(test, loom)))]
mod file;
#[cfg(not(all(test, loom)))]
mod fill;
#[cfg(not(all(test, loom)))]
mod inode;
#[cfg(not(all(test, loom)))]
mod io;
#[cfg(not(all(test, loom)))]
mod keep;
#[cfg(all(feature = "maps", not(all(test, loom))))]
mod maps;
#[cfg(not(all(test, loom)))]
mod memory;
mod page;
#[cfg(not(all(test, loom)))]
mod reclaim;
#[cfg(not(all(test, loom)))]
mod share;
#[cfg(not(all(test, loom)))]
mod stats;
#[cfg(not(all(test, loom)))]
mod store;
mod sync;
#[cfg(not(all(test, loom)))]
mod sys;
#[cfg(test)]
mod tests;
#[cfg(not(all(test, loom)))]
mod warm;
#[cfg(not(all(test, loom)))]
mod writeback;
/// The protocols that a model run can follow.
#[cfg(all(test, loom))]
mod dirt {
    pub(crate) mod dirty;
    pub(crate) mod flush;
    pub(crate) mod lsns;
    pub(crate) mod throttle;
}
#[cfg(all(test, loom))]
mod file {
    pub(crate) mod open {
        pub(crate) mod slots;
    }
    pub(crate) mod async_calls {
        pub(crate) mod handover;
        pub(crate) mod job_list;
    }
}
#[cfg(all(test, loom))]
mod inode {
    pub(crate) mod clearing;
}
#[cfg(all(test, loom))]
mod memory {
    mod classes;
    mod lists;
    mod lru;
    pub(crate) use lists::ListKind;
    pub(crate) use lru::Lru;
}
#[cfg(all(test, loom))]
mod share {
    pub(crate) mod slot;
}
/// The part of `sys` that makes no system calls.
#[cfg(all(test, loom))]
mod sys {
    pub(crate) mod copy;
}

#[cfg(not(all(test, loom)))]
mod surface {
    pub use crate::cache::{Cache, CacheBuilder, Class, ClassStats, Reserved, WeakCache};
    pub use crate::config::HugePages;
    #[cfg(feature = "ablation")]
    pub use crate::config::{DrainPolicy, PinMode};
    pub use crate::dirt::WriteGate;
    pub use crate::error::{Error, ErrorKind, Result};
    #[cfg(feature = "maps")]
    pub use crate::file::FaultMode;
    pub use crate::file::{
        Access, Checkpoint, File, FileFuture, GatedFile, ImmutableFile, OpenOptions, OwnedPageRef,
        PageRef, PageRefMut, PageView, ReadRequest, Residency, WriteHint,
    };
    pub use crate::inode::PageCodec;
    pub use crate::io::DirectIo;
    #[cfg(feature = "refusals")]
    #[doc(hidden)]
    pub use crate::maps::kernel::refusals::{Refusable, refuse};
    #[cfg(feature = "maps")]
    pub use crate::maps::map::{Map, MapMut, MapPinMut};
    pub use crate::reclaim::{Evicted, Kept};
    pub use crate::stats::{
        DeviceStats, EvictionStats, FileStats, MapStats, MemoryStats, ReadStats, Stats,
        StorageStats, WriteStats,
    };
    /// For tests and benchmarks.
    #[doc(hidden)]
    pub use crate::sys::probe::Feature;
    pub use crate::sys::probe::FeatureReport;
    pub use crate::warm::{HotRestore, RestoreProgress, SavedHot};

    /// Probes the system's optional features, as a cache does when it is built: what is available,
    /// what would be in use, and what stands in for the rest.
    pub fn features() -> Vec<FeatureReport> {
        crate::sys::probe::Features::probe(&[]).reports()
    }

    /// Returns the memory in bytes that this process may use: that of the machine, or the least
    /// limit of its control groups (versions 1 and 2, with all parents that the file system shows).
    /// A bound for a cache can be a part of it.
    ///
    /// ```
    /// let cache = bifolio::Cache::builder().memory(bifolio::memory_allowed() / 4).build()?;
    /// # Ok::<(), bifolio::Error>(())
    /// ```
    pub fn memory_allowed() -> u64 {
        crate::sys::memory::MemoryLimit::allowed_bytes()
    }
}
/// Storage of your own under a cache: what implementers of [`Backing`](backing::Backing) need.
#[cfg(not(all(test, loom)))]
pub mod backing {
    pub use crate::io::{
        Alignment, Backing, DirectBacking, DirectStatus, DiskFile, FallocateMode, FileIdentity,
        IoBuf, IoBufMut, IoBuffer, IoRequest, Operation, Submission,
    };
}

/// Items by which the crate `bifolio-share` serves a cache to other processes. They may change with
/// any version.
#[cfg(not(all(test, loom)))]
#[doc(hidden)]
pub mod sharing {
    pub use crate::share::{
        FilePlace, FileWindow, FramePlace, Gone, SharedArea, SlotWord, Wait, Window,
    };
}

#[cfg(not(all(test, loom)))]
pub use surface::*;
